import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_tfds

from electra_jax.data import reader
from electra_jax.data.reader import Documents, groups, take_apart
from electra_jax.data.sources import data_set, parse
from electra_jax.errors import UserError

TEXT = "It rains.\nCome in.\n\n\n  Yes. \n"
DOCUMENTS = [["It rains.", "Come in."], ["Yes."]]


def read_all(source: str | Path, on_error: str = "raise") -> Documents:
    total = Documents()
    for group in groups(parse(str(source))):
        documents = take_apart(group, on_error)
        total.found += documents.found
        total.dropped.update(documents.dropped)
        total.divided += documents.divided
        total.damage += documents.damage
    return total


def read(source: str | Path) -> list[list[str]]:
    return [document for _, document in read_all(source).found]


@pytest.fixture
def tiny_parts(monkeypatch):
    """Cuts everywhere that is allowed, so that a few lines see every kind of cut."""
    monkeypatch.setattr(reader, "PART_BYTES", 8)
    monkeypatch.setattr(reader, "_READ_BYTES", 3)
    monkeypatch.setattr(reader, "DOCUMENT_BYTES", 64)


SAME = [
    TEXT,
    TEXT.rstrip("\n"),
    TEXT.replace("\n", "\r\n"),
    TEXT.replace("\n", "\r"),
    "\ufeff" + TEXT,
    "\n\n" + TEXT + "\n \t\n",
    TEXT.replace("\n\n", "\n\u3000\n"),
    TEXT.replace("\n\n", "\r\n \t \f\n"),
]
NAMES = ["plain", "no last newline", "CRLF", "CR", "BOM", "blank at both ends", "wide", "mixed"]


@pytest.mark.parametrize("content", SAME, ids=NAMES)
def test_blank_lines_separate_documents(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("content", SAME, ids=NAMES)
def test_cuts_into_parts_change_nothing(tmp_path, content, tiny_parts):
    path = tmp_path / "text.txt"
    path.write_bytes((content + "\n\n").encode() * 20)
    found = read_all(path)
    expected = DOCUMENTS * 20
    if content.startswith("\ufeff"):  # a byte order mark further on is a character
        expected = DOCUMENTS + [["\ufeffIt rains.", "Come in."], ["Yes."]] * 19
    assert [document for _, document in found.found] == expected
    assert found.divided == 0
    assert len(list(groups(parse(str(path))))) > 20


def test_documents_may_be_lines_or_files(tmp_path, tiny_parts):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    lines = [["It rains."], ["Come in."], ["Yes."]]
    assert read(f"{tmp_path}/*.txt#documents=line") == lines * 2
    assert read(f"{tmp_path}/*.txt#documents=file") == [["It rains.", "Come in.", "Yes."]] * 2


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".txt", bytes),
        (".txt.gz", gzip.compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".txt.zst", lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True)),
    ],
)
def test_compression_follows_the_suffix(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(TEXT.encode()) * 2)  # as archives that were appended to are
    assert read(path) == [*DOCUMENTS[:1], ["Yes.", "It rains.", "Come in."], ["Yes."]]


def test_only_newlines_end_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\x0btwo\x85three\u2028four\x0cfive\n", encoding="utf-8")
    assert read(path) == [["one\x0btwo\x85three\u2028four\x0cfive"]]


def test_long_documents_are_divided_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "PART_BYTES", 50)
    monkeypatch.setattr(reader, "_READ_BYTES", 10)
    monkeypatch.setattr(reader, "DOCUMENT_BYTES", 100)
    words = [f"w{number}" for number in range(1000)]
    for name, content, joint in [
        ("one line", " ".join(words), " "),
        ("lines", "\n".join(words), " "),
        ("old lines", "\r".join(words), " "),
        ("no spaces", "水" * 1000, ""),
        ("narrow and wide", "a水é" * 333, ""),
    ]:
        for suffix in ("txt", "jsonl"):
            path = tmp_path / f"{name}.{suffix}"
            path.write_text(
                json.dumps({"text": content}) if suffix == "jsonl" else content, newline=""
            )
            documents = read_all(path)
            lines = [line for _, document in documents.found for line in document]
            assert joint.join(lines) == joint.join(content.split()), path.name
            assert max(len(line.encode()) for line in lines) <= 150
            if suffix == "txt":
                assert documents.divided >= 10


def test_small_files_share_a_group_and_keep_their_places(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"file {number}")
    [group] = groups(parse(f"{tmp_path}/0*.txt,{tmp_path}/*.txt"))
    assert group.done == 1.0
    found = take_apart(group, "raise").found
    assert found == [(int(number > 99), [f"file {number}"]) for number in range(300)]


def test_json_lines_give_their_field(tmp_path, tiny_parts):
    path = tmp_path / "a.jsonl"
    records = [{"id": 1, "text": "It rains.\r\n\nCome in."}, {"text": ""}, {"text": None}]
    lines = [json.dumps(record) for record in records] + ["", '{"text": "na\\u00efve \\u2028"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    documents = read_all(path)
    assert documents.found == [(0, ["It rains.", "Come in."]), (0, ["naïve"])]
    assert documents.dropped == {"documents without text": 2}
    path.write_text('{"body": "b"}')
    assert read(f"{path}#field=body") == [["b"]]


def test_parquet_gives_its_column(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"document {number}\nsecond line" for number in range(1000)]
    table = pyarrow.table({"body": [*texts, None], "other": [0] * 1001})
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    documents = read_all(f"{path}#field=body")
    assert documents.found == [(0, text.split("\n")) for text in texts]
    assert documents.dropped == {"documents without text": 1}
    with pytest.raises(UserError, match=rf"^{path}: there is no column 'text'; .* body, other$"):
        read(path)
    with pytest.raises(UserError, match=rf"^{path}: record 1 holds no text but .*int"):
        read(f"{path}#field=other")


def test_tensorflow_data_sets_are_read_without_tensorflow(tmp_path, monkeypatch):
    tiny_tfds.make(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    data_set.cache_clear()
    found = read("tfds:tiny_text")
    assert sorted(found) == sorted(
        [f"Document {number}.", "Second line, naïve."] for number in range(500)
    )
    assert len(read("tfds:tiny_text:1.0.0#split=test#field=text")) == 3
    assert len(read("tfds:tiny_text#split=train[:10%]")) == 50
    assert "tensorflow" not in __import__("sys").modules
    for source, message in [
        ("tfds:tiny_tex", "tfds:tiny_tex, split train: .*not found"),
        ("tfds:tiny_text#split=dev", "split dev: .*dev"),
        ("tfds:tiny_text#field=body", "#field=body is missing; it has text, title"),
    ]:
        with pytest.raises(UserError, match=rf"^data\.source: .*{message}"):
            read(source)


SOUND = "fine\n\n"
# Without the time of day: part of a test's name, which must be the same in all test processes.
CUT = gzip.compress(SOUND.encode() * 9, mtime=0)[:-4]


@pytest.mark.parametrize(
    ("name", "content", "message", "reason"),
    [
        ("a.txt", SOUND.encode() + b"na\xefve\n", r"line 3 is not UTF-8: .* at byte 2 of", "lines"),
        ("a.txt", SOUND.encode() + b"cut \xe6\xb0", r"line 3 is not UTF-8: .* at byte 4", "lines"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "a', r"line 2 is not JSON: ", "JSON"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": "\xff"}', r"line 3 is not JSON: ", "JSON"),
        (
            "a.jsonl",
            b'{"text": "fine"}\n{"txt": 1}',
            r"line 2 has no field 'text'; .*'txt'",
            "field",
        ),
        ("a.jsonl", b'{"text": "fine"}\n["text"]', r"line 2 has no field 'text'; .*list", "field"),
        (
            "a.jsonl",
            b'{"text": "fine"}\n{"text": [1]}',
            r"line 2 holds no text but .*list",
            "no text",
        ),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\\ud800"}', r"line 2 is not UTF-8", "UTF-8"),
        ("a.gz", CUT, r"cannot be read beyond line 18: ", "end"),
        ("a.gz", SOUND.encode(), r"cannot be read at all: .", "end"),
        ("a.parquet", b"PAR1" * 10, r"cannot be read at all: .", "end"),
    ],
)
def test_damage_is_located_or_counted(tmp_path, name, content, message, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: {message}"):
        read(path)
    documents = read_all(path, "skip")
    assert all(document == ["fine"] for _, document in documents.found)
    [(counted, count)] = documents.dropped.items()
    assert (count, reason in counted) == (1, True)
    assert len(documents.damage) == 1


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".zst", lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True)),
    ],
)
def test_no_archive_ends_in_silence(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    numbers = np.random.default_rng(0).random(100_000)
    text = "\n\n".join(map(str, numbers)).encode()
    whole = compress(text)
    for damaged in (whole[:-20], whole[: len(whole) // 2], whole[:1000] + whole[1100:]):
        path.write_bytes(damaged)
        with pytest.raises(
            UserError, match=rf"^{path}: cannot be read (beyond line \d+|at all): ."
        ):
            read(path)
        kept = read_all(path, "skip")
        expected = text.decode().split("\n\n")
        assert [line for _, [line] in kept.found] == expected[: len(kept.found)]


def test_record_without_end_is_refused_or_counted(tmp_path, monkeypatch, tiny_parts):
    monkeypatch.setattr(reader, "RECORD_BYTES", 100)
    path = tmp_path / "array.jsonl"
    path.write_text('{"text": "fine"}\n[' + '{"text": "never ends"}, ' * 20)
    message = rf"^{path}: cannot be read beyond line 1: more than 100 bytes without the end"
    with pytest.raises(UserError, match=message):
        read(path)
    documents = read_all(path, "skip")
    assert documents.found == [(0, ["fine"])]
    assert documents.dropped == {"inputs that cannot be read to their end": 1}


def test_files_that_are_none_are_named(tmp_path):
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "text.txt").write_text("fine")
    with pytest.raises(UserError, match=rf"^{tmp_path}/sub\.txt is a directory; name its files"):
        read(f"{tmp_path}/*.txt")
    documents = read_all(f"{tmp_path}/*.txt", "skip")
    assert documents.found == [(0, ["fine"])]
    assert documents.dropped == {"inputs that cannot be read to their end": 1}


def test_link_to_nowhere_is_named_or_counted(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UserError, match=rf"^{link}: cannot be read at all: No such file"):
        read(link)
    assert read_all(link, "skip").dropped == {"inputs that cannot be read to their end": 1}


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("fine")

    def refuse(name):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(reader, "open_file", refuse)  # root may read what no one may
    with pytest.raises(UserError, match=rf"^{path}: cannot be read at all: Permission denied$"):
        read(path)


def test_progress_says_rate_and_time_left(monkeypatch, tmp_path, tiny_parts):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 50)
    monkeypatch.setattr(reader, "_LOG_SECONDS", -1)
    messages: list[str] = []
    total = len(list(reader.logged(groups(parse(str(path))), "read", messages.append)))
    assert len(messages) == total
    assert messages[-1].startswith("read 100%, ")
    assert messages[-1].endswith("MB/s, 0 s left")
