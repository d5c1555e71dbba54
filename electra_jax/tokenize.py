"""Text to token ids: one interface, two families, WordPiece and SentencePiece.

    python -m electra_jax.tokenize --vocab=vocab.txt --lower_case --strip_accents < lines.txt

shows how text is tokenized. It reads UTF-8 lines on standard input and prints a JSON object for
each, without [CLS] and [SEP]; offsets are ranges of characters in the line:

    {"ids": [2009, 15811], "tokens": ["it", "rains"], "offsets": [[0, 2], [3, 8]]}

    --vocab=FILE           one word piece a line, or a SentencePiece model (*.model)
    --vocab=DIR            a saved tokenizer, such as data/STORE/tokenizer, which has its own
                           settings; the flags below are for files
    --lower_case           lower-case the text
    --strip_accents        remove accents; only together with --lower_case
    --max_word_chars=200   longer words become [UNK]; WordPiece only
    --special_tokens=...   names of padding, unknown, start, end and mask token, with commas
    --keep_special_tokens  those that are typed in the text stay whole, as in Hugging Face's
                           tokenizers; otherwise they are text like any other
"""

import json
import sys
from functools import partial
from pathlib import Path

from absl import flags

from electra_jax import cli
from electra_jax.data import tokenizers
from electra_jax.data.tokenizers import base
from electra_jax.errors import UserError


def main() -> None:
    """Print the tokens of each line of standard input."""
    values = _flags()
    cli.parse(values, __doc__)
    tokenizer = _tokenizer(values)
    encode = tokenizer.encode_with_offsets
    if values.keep_special_tokens:
        encode = partial(base.encode_with_special_tokens, tokenizer)
    for number, line in enumerate(sys.stdin.buffer, start=1):  # only "\n" ends a line here
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"standard input: line {number}"
            raise UserError(f"{where} is not UTF-8 at byte {error.start}") from error
        answer = zip(("ids", "tokens", "offsets"), encode(text), strict=True)
        print(json.dumps(dict(answer)), flush=True)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("vocab", "", "vocabulary file or saved tokenizer", flag_values=values)
    flags.DEFINE_bool("lower_case", False, "lower-case the text", flag_values=values)
    flags.DEFINE_bool("strip_accents", False, "remove accents", flag_values=values)
    flags.DEFINE_integer("max_word_chars", 200, "longest word", flag_values=values)
    flags.DEFINE_list("special_tokens", [*base.SPECIAL_TOKENS], "names", flag_values=values)
    flags.DEFINE_bool("keep_special_tokens", False, "typed in the text", flag_values=values)
    return values


def _tokenizer(values: flags.FlagValues) -> base.Tokenizer:
    settings = {name: values[name].value for name in base.SETTINGS}
    given = [name for name in settings if values[name].present]
    for name in given:
        base.check_setting(f"--{name}", name, settings[name])
    if not values.vocab:
        raise UserError("--vocab is missing; give a vocabulary file or a saved tokenizer")
    if Path(values.vocab).is_dir():
        if given:
            raise UserError(f"--{given[0]} is given, but {values.vocab} has settings of its own")
        return tokenizers.load(values.vocab)
    if settings["strip_accents"] and not settings["lower_case"]:
        raise UserError("--strip_accents is given, which works only together with --lower_case")
    if "max_word_chars" in given and values.vocab.endswith(".model"):
        raise UserError(f"--max_word_chars is given, but has no meaning for {values.vocab}")
    return tokenizers.from_file(values.vocab, **settings)


if __name__ == "__main__":
    cli.run(main)
