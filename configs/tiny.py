"""tiny."""

from electra_jax.config import get_config as default


def get_config():
    c = default()
    c.data.vocab_size = 8192
    c.data.held_out = 0.02
    c.data.sequence_length = 32
    c.batch_size = 64
    c.num_train_steps = 300
    c.model.update(
        hidden_size=128,
        num_layers=2,
        max_positions=32,
        init_stddev=0.08,
        dropout=0.0,
        attention_dropout=0.0,
        scan_unroll=2,
        remat="none",
    )
    c.generator.width = 1.0
    c.optimizer.update(learning_rate=1.5e-3, warmup_steps=300, b2=0.98)
    c.eval_every_steps = 250
    return c
