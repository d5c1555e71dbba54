"""Text in, batches out: sources, tokenizer, token store, layouts, loader."""
