"""Where text comes from: the entries of `config.data.source`, and how they are recognized again.

A source is one or more entries, separated by commas:

    docstrings                      what every machine has (electra_jax.data.formats.docstrings)
    corpus/*.txt.xz                 text files: a blank line ends a document
    corpus/*.txt#documents=line     a document a line; or `file`: a document a file
    corpus/*.jsonl.zst              JSON lines: a document a record, in its field "text"
    corpus/*.parquet#field=body     Parquet, likewise, in the column "body"
    tfds:wikipedia/20230601.en      a TensorFlow data set; #split=train, #field=text
    gs://bucket/corpus/*.jsonl      any of the files above in a bucket, read through fsspec

Files may be compressed: .gz, .xz, .bz2, .zst. Their format (electra_jax.data.formats) follows from
what is left of the name; whatever is not known is text.

Every entry may have a weight: with `a/*.txt#weight=3,b/*.txt#weight=1`, three rows of every four
that are trained on come from the first entry. Without weights everything is read equally often.
"""

import contextlib
import glob
import math
import os
from dataclasses import dataclass

from electra_jax.data.formats import FORMATS, format_of_file, format_without_files
from electra_jax.data.formats.base import Input
from electra_jax.data.opening import file_system
from electra_jax.errors import UserError
from electra_jax.settings import Check, settings_of


@dataclass(frozen=True)
class Source:
    """An entry of `config.data.source`."""

    location: str  # `docstrings`, `tfds:NAME`, or the path, glob or address of files
    options: tuple[tuple[str, str], ...] = ()  # names and values, sorted
    weight: float | None = None  # of its rows; None where no entry has one

    def __str__(self) -> str:
        return "#".join([self.location, *(f"{name}={value}" for name, value in self.options)])


def parse(source: str) -> list[Source]:
    """The entries of `config.data.source`.

    Raises:
      UserError: an option or weight is not allowed, or only some entries have a weight.
    """
    entries = [_parse_entry(entry.strip()) for entry in source.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"data.source: found {source!r}; allowed are 'docstrings' or files")
    without = [str(entry) for entry in entries if entry.weight is None]
    if 0 < len(without) < len(entries):
        raise UserError(f"data.source: {without[0]} has no #weight=, but other entries have")
    return entries


def _parse_entry(entry: str) -> Source:
    location, *options = (part.strip() for part in entry.split("#"))
    checks = {name: one.check for name, one in settings_of(*FORMATS.values()).items()}
    checks["weight"] = Check(_is_weight, "a number above 0")
    values = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in checks or not value:
            allowed = ", ".join(f"{name}=" for name in checks)
            raise UserError(
                f"data.source: {entry!r} has the option {option!r}; allowed: {allowed} and a value"
            )
        if not checks[name].is_allowed(value):
            raise UserError(
                f"data.source: {entry!r} has {option}; allowed as {name}=: {checks[name]}"
            )
        values[name] = value
    weight = values.pop("weight", None)
    return Source(location, tuple(sorted(values.items())), weight and float(weight))


def _is_weight(value: str) -> bool:
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


def weights(sources: list[Source]) -> tuple[float, ...] | None:
    """The weights of all entries, or None when none has one."""
    return None if sources[0].weight is None else tuple(entry.weight for entry in sources)


def inputs(sources: list[Source]) -> list[Input]:
    """All inputs that the entries name, in their order: the files of a glob sorted, each file once.

    Raises:
      UserError: there is nothing of that name, or an option does not suit what is there.
    """
    by_key: dict[tuple, Input] = {}  # An ordered set: globs may overlap.
    for number, source in enumerate(sources):
        alone = format_without_files(source.location)
        for name, size in [(source.location, 0)] if alone else _files(source.location):
            key = alone or format_of_file(name)
            known = settings_of(FORMATS[key])
            unknown = [option for option, _ in source.options if option not in known]
            if unknown:
                raise UserError(
                    f"data.source: #{unknown[0]}= has no meaning for {name}, which is read as "
                    f"{key}; allowed: {', '.join((*known, 'weight'))}"
                )
            form = FORMATS[key](**dict(source.options))
            split = getattr(form, "split", None)  # several of one data set are several inputs
            by_key.setdefault((name, split), Input(number, name, form, size))
    return list(by_key.values())


def fingerprint(sources: list[Source]) -> list[dict]:
    """Identifies the inputs behind the entries, as JSON, without reading all of them."""
    return [input.format.fingerprint(input.name, input.size) for input in inputs(sources)]


def versions(sources: list[Source]) -> list[dict]:
    """The part of the fingerprint that is not about files: of packages and of data sets."""
    return fingerprint([source for source in sources if format_without_files(source.location)])


def changed(sources: list[Source], recorded: list[dict]) -> str | None:
    """The first input that differs from, or is new to, a recorded fingerprint.

    Inputs that are gone do not count: a corpus may be deleted once it has been tokenized.
    """
    known = {entry["name"]: entry for entry in recorded}
    for source in sources:
        with contextlib.suppress(UserError):  # gone
            for entry in fingerprint([source]):
                if entry != known.get(entry["name"]):
                    return entry["name"]
    return None


def _files(location: str) -> list[tuple[str, int]]:
    """Names and sizes of the files that a path, glob or address stands for."""
    if "://" in location:
        system, path = file_system(location)
        try:
            entries = system.glob(path, detail=True)
        except Exception as error:  # of whatever serves the address
            raise UserError(f"{location}: cannot be listed: {error}") from error
        files = [
            (system.unstrip_protocol(name), entry["size"])
            for name, entry in sorted(entries.items())
            if entry["type"] == "file"
        ]
    else:
        names = sorted(glob.glob(os.path.expanduser(location), recursive=True))
        # A link to nowhere is among them, too: reading it will say so, or count it.
        files = [(name, os.path.getsize(name) if os.path.exists(name) else 0) for name in names]
    if not files:
        raise UserError(
            f"data.source: no file matches {location!r}; allowed are 'docstrings', tfds:NAME, "
            "and paths, globs or addresses of files, separated by commas"
        )
    return files
