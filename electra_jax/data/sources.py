"""Where text comes from: what `config.data.source` names, and how it is recognised again.

A source is one or more entries, separated by commas:

    docstrings                      what every machine has (electra_jax.data.docstrings)
    corpus/*.txt.xz                 text files: a blank line ends a document
    corpus/*.txt#documents=line     a document a line; or `file`: a document a file
    corpus/*.jsonl.zst              JSON lines: a document a record, in its field "text"
    corpus/*.parquet#field=body     Parquet, likewise, in the column "body"
    tfds:wikipedia/20230601.en      a TensorFlow data set; #split=train, #field=text
    gs://bucket/corpus/*.jsonl      any of the files above in a bucket, read through fsspec

Files may be compressed: .gz, .xz, .bz2, .zst. Their format follows from what is left of the name;
whatever is not known (.jsonl, .ndjson, .parquet) is text.

Every entry may have a weight: with `a/*.txt#weight=3,b/*.txt#weight=1`, three rows of every four
that are trained on come from the first entry. Without weights everything is read equally often.
"""

import functools
import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from electra_jax.data import docstrings
from electra_jax.errors import UserError

DOCSTRINGS = "docstrings"
TFDS = "tfds:"
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_OPTIONS = {  # of each format, beside the weight
    "text": ("documents",),
    "jsonl": ("field",),
    "parquet": ("field",),
    "tfds": ("field", "split"),
    "docstrings": (),
}
_DOCUMENTS = ("blank_line", "line", "file")
_FINGERPRINT_BYTES = 2**20

Stream = Any  # something to read bytes from; not every library derives its own from `io`


@dataclass(frozen=True)
class Source:
    """An entry of `config.data.source`.

    Attributes:
      location: `docstrings`, `tfds:NAME`, or the path, glob or address of files.
      options: pairs of names and values: `documents`, `field`, `split`.
      weight: share of the rows, relative to the other entries; None: no weights are given.
    """

    location: str
    options: tuple[tuple[str, str], ...] = ()
    weight: float | None = None

    def __str__(self) -> str:
        return "#".join([self.location, *(f"{name}={value}" for name, value in self.options)])

    def option(self, name: str, default: str) -> str:
        """The value of an option."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class Input:
    """Something to be read in one go.

    Attributes:
      source: number of the entry that named it.
      name: path or address of a file, name of a data set, or `docstrings`.
      format: `text`, `jsonl`, `parquet`, `tfds` or `docstrings`.
      documents, field, split: the options of the entry.
      size: in bytes, as far as known. For progress.
    """

    source: int
    name: str
    format: str
    documents: str
    field: str
    split: str
    size: int


def parse(source: str) -> list[Source]:
    """The entries of `config.data.source`.

    Raises:
      UserError: an option or weight is not allowed, or only some entries have a weight.
    """
    entries = [_parse_entry(entry.strip()) for entry in source.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"data.source: found {source!r}; allowed are {DOCSTRINGS!r} or files")
    without = [str(entry) for entry in entries if entry.weight is None]
    if 0 < len(without) < len(entries):
        raise UserError(f"data.source: {without[0]} has no #weight=, but other entries have")
    return entries


def weights(sources: list[Source]) -> tuple[float, ...] | None:
    """The weights of all entries, or None when none has one."""
    return None if sources[0].weight is None else tuple(entry.weight for entry in sources)


def inputs(sources: list[Source]) -> list[Input]:
    """All that the entries name, in their order: the files of a glob sorted, each file once.

    Raises:
      UserError: there is nothing of that name, or an option does not suit what is there.
    """
    found: dict[str, Input] = {}  # An ordered set: globs may overlap.
    for number, source in enumerate(sources):
        for name, form, size in _located(source):
            for option, _ in source.options:
                if option not in _OPTIONS[form]:
                    allowed = ", ".join((*_OPTIONS[form], "weight"))
                    raise UserError(
                        f"data.source: #{option}= has no meaning for {name}, which is read as "
                        f"{form}; allowed: {allowed}"
                    )
            value = source.option
            made = Input(
                number,
                name,
                form,
                documents=value("documents", _DOCUMENTS[0]),
                field=value("field", "text"),
                split=value("split", "train"),
                size=size,
            )
            found.setdefault(f"{name}#{made.split}" if form == "tfds" else name, made)
    return list(found.values())


def fingerprint(sources: list[Source]) -> list[dict]:
    """Identifies the input behind the entries, as JSON, without reading all of it.

    A file is known by its size and the hash of its first and last MiB: unlike a modification
    time, these survive copying to another machine. Docstrings are known by the versions of
    Python and of the installed packages, a data set by its version and size.
    """
    return [_fingerprint(input) for input in inputs(sources)]


def versions(sources: list[Source]) -> list[dict]:
    """The part of the fingerprint that is not about files: of packages and of data sets."""
    no_files = [source for source in sources if source.location.startswith((DOCSTRINGS, TFDS))]
    return fingerprint(no_files)


def changed(sources: list[Source], recorded: list[dict]) -> str | None:
    """The first input that differs from, or is new to, a recorded fingerprint.

    What is gone does not count: a corpus may be deleted once it has been tokenised.
    """
    known = {entry["name"]: entry for entry in recorded}
    for source in sources:
        try:
            found = inputs([source])
        except UserError:
            continue  # gone
        for input in found:
            if _fingerprint(input) != known.get(input.name):
                return input.name
    return None


def open_file(name: str) -> Stream:
    """Opens a file or the address of one for reading, compressed as it is."""
    if _is_address(name):
        file_system, path = _file_system(name)
        return file_system.open(path, "rb")
    return open(name, "rb")


@functools.cache
def data_set(name: str, split: str, *fields: str) -> Any:
    """A TensorFlow data set as a random-access sequence of dicts; needs no TensorFlow.

    Only the values of `fields` are decoded.

    Raises:
      UserError: there is no such data set, split or field, or it cannot be read this way.
    """
    import tensorflow_datasets as tfds  # heavy, and seldom needed

    name = name.removeprefix(TFDS)
    try:
        builder = tfds.builder(name, file_format="array_record")
        builder.download_and_prepare()
        found = builder.info.features.keys()
        for field in fields:
            if field not in found:
                raise UserError(f"#field={field} is missing; it has {', '.join(sorted(found))}")
        return tfds.data_source(
            name,
            split=split,
            builder_kwargs={"file_format": "array_record"},
            decoders={other: tfds.decode.SkipDecoding() for other in {*found} - {*fields}},
        )
    except Exception as error:  # tfds raises all sorts
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.source: tfds:{name}, split {split}: {reason}") from error


def _parse_entry(entry: str) -> Source:
    location, *options = (part.strip() for part in entry.split("#"))
    values = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("documents", "field", "split", "weight") or not value:
            raise UserError(
                f"data.source: {entry!r} has the option {option!r}; allowed: documents=, field=, "
                "split=, weight= and a value"
            )
        values[name] = value
    if values.get("documents", _DOCUMENTS[0]) not in _DOCUMENTS:
        raise UserError(
            f"data.source: {entry!r} has documents={values['documents']}; allowed: "
            + ", ".join(_DOCUMENTS)
        )
    weight = values.pop("weight", None)
    if weight is not None:
        try:
            weight = float(weight)
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise UserError(f"data.source: {entry!r}: a weight is a number above 0")
    return Source(location, tuple(sorted(values.items())), weight)


def _located(source: Source) -> Iterator[tuple[str, str, int]]:
    """Name, format and size in bytes of everything that an entry names."""
    location = source.location
    if location == DOCSTRINGS:
        yield location, "docstrings", 0
    elif location.startswith(TFDS):
        yield location, "tfds", 0
    else:
        for name, size in _files(location):
            yield name, _format(name), size


def _format(name: str) -> str:
    path = PurePosixPath(name.lower())
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    return _FORMATS.get(path.suffix, "text")


def _files(location: str) -> list[tuple[str, int]]:
    """Names and sizes of the files that a path, glob or address stands for."""
    if _is_address(location):
        file_system, path = _file_system(location)
        try:
            found = file_system.glob(path, detail=True)
        except Exception as error:  # of whatever serves the address
            raise UserError(f"data.source: cannot list {location}: {error}") from error
        files = [
            (file_system.unstrip_protocol(name), entry["size"])
            for name, entry in sorted(found.items())
            if entry["type"] == "file"
        ]
    else:
        names = sorted(glob.glob(os.path.expanduser(location), recursive=True))
        # A link to nowhere is found, too: reading it will say so, or count it.
        files = [(name, os.path.getsize(name) if os.path.exists(name) else 0) for name in names]
    if not files:
        raise UserError(
            f"data.source: no file matches {location!r}; allowed are {DOCSTRINGS!r}, tfds:NAME, "
            "and paths, globs or addresses of files, separated by commas"
        )
    return files


def _is_address(name: str) -> bool:
    return "://" in name


def _file_system(address: str) -> tuple[Any, str]:
    """What serves an address, and the path there."""
    import fsspec  # seldom needed

    try:
        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:  # a package is missing; no such protocol
        raise UserError(f"data.source: cannot open {address}: {error}") from error


def _fingerprint(input: Input) -> dict:
    if input.format == "docstrings":
        return {"name": input.name, **docstrings.fingerprint()}
    if input.format == "tfds":
        found = data_set(input.name, input.split, input.field)
        info = found.dataset_info
        return {"name": input.name, "version": info.full_name, "examples": len(found)}
    try:
        with open_file(input.name) as file:
            ends = hashlib.sha256(file.read(_FINGERPRINT_BYTES))
            file.seek(max(_FINGERPRINT_BYTES, input.size - _FINGERPRINT_BYTES))
            ends.update(file.read())
    except OSError as error:
        # Reading it will say so, or count it.
        return {"name": input.name, "error": type(error).__name__}
    return {"name": input.name, "bytes": input.size, "sha256_of_ends": ends.hexdigest()}
