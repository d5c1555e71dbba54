import bz2
import gzip
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_tfds

from electra_jax.data import reader
from electra_jax.data.formats import FORMATS, text
from electra_jax.data.formats.base import LIMITS, Limits, Records
from electra_jax.data.formats.tfds import data_set
from electra_jax.data.reader import Documents, Group, groups, take_apart
from electra_jax.data.sources import parse
from electra_jax.errors import UserError
from electra_jax.settings import one_of, setting

TEXT = "It rains.\nCome\x0b\x85\u2028\x0cin.\n\n\n  Yes. \n"  # only newlines end a line
DOCUMENTS = [["It rains.", "Come\x0b\x85\u2028\x0cin."], ["Yes."]]
TINY = Limits(read=3, part=8, document=64)  # cuts everywhere that is allowed
COMPRESS = {
    ".txt": bytes,
    ".txt.gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".txt.zst": lambda data: pyarrow.Codec("zstd").compress(data, asbytes=True),
}


def read_all(source: str | Path, on_error: str = "raise", limits: Limits = LIMITS) -> Documents:
    parts = [part for group in groups(parse(str(source)), limits) for part in group.parts]
    return take_apart(Group(parts), on_error, limits)


def read(source: str | Path, limits: Limits = LIMITS) -> list[list[str]]:
    return [document for _, document in read_all(source, limits=limits).documents]


SAME = {
    "plain": TEXT,
    "no last newline": TEXT.rstrip("\n"),
    "CRLF": TEXT.replace("\n", "\r\n"),
    "CR": TEXT.replace("\n", "\r"),
    "BOM": "\ufeff" + TEXT,
    "blank at both ends": "\n\n" + TEXT + "\n \t\n",
    "wide": TEXT.replace("\n\n", "\n\u3000\n"),
    "mixed": TEXT.replace("\n\n", "\r\n \t \f\n"),
}


@pytest.mark.parametrize("case", SAME)
def test_blank_lines_separate_documents_wherever_parts_are_cut(tmp_path, case):
    path = tmp_path / "text.txt"
    path.write_bytes(SAME[case].encode())
    assert read(path) == DOCUMENTS
    path.write_bytes((SAME[case] + "\n\n").encode() * 20)
    expected = DOCUMENTS * 20
    if case == "BOM":  # further on, it is a character
        expected = DOCUMENTS + [["\ufeffIt rains.", DOCUMENTS[0][1]], ["Yes."]] * 19
    content = read_all(path, limits=TINY)
    assert [document for _, document in content.documents] == expected
    assert content.divided == 0
    assert len(list(groups(parse(str(path)), TINY))) > 20


def test_documents_may_be_lines_or_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    lines = [line for document in DOCUMENTS for line in document]
    assert read(f"{tmp_path}/*.txt#documents=line", TINY) == [[line] for line in lines * 2]
    assert read(f"{tmp_path}/*.txt#documents=file", TINY) == [lines] * 2


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compression_follows_the_suffix(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT.encode()) * 2)  # as archives that were appended to are
    assert read(path) == [DOCUMENTS[0], ["Yes.", *DOCUMENTS[0]], ["Yes."]]


def test_long_documents_are_divided_and_nothing_is_lost(tmp_path):
    limits = Limits(read=10, part=50, document=100)
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
            record = json.dumps({"text": content})
            path.write_text(record if suffix == "jsonl" else content, newline="")
            divided = read_all(path, limits=limits)
            lines = [line for _, document in divided.documents for line in document]
            assert joint.join(lines) == joint.join(content.split()), path.name
            assert max(len(line.encode()) for line in lines) <= 150
            assert suffix == "jsonl" or divided.divided >= 10


def test_small_files_share_a_group_and_keep_their_places(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"file {number}")
    [group] = groups(parse(f"{tmp_path}/0*.txt,{tmp_path}/*.txt"))
    assert group.done == 1.0
    found = take_apart(group, "raise").documents
    assert found == [(int(number > 99), [f"file {number}"]) for number in range(300)]


def test_json_lines_give_their_field(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"id": 1, "text": "It rains.\r\n\nCome in."}, {"text": ""}, {"text": None}]
    lines = [json.dumps(record) for record in records] + ["", '{"text": "na\\u00efve \\u2028"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    content = read_all(path, limits=TINY)
    assert content.documents == [(0, ["It rains.", "Come in."]), (0, ["naïve"])]
    assert content.dropped == {"documents without text": 2}
    path.write_text('{"body": "b"}')
    assert read(f"{path}#field=body") == [["b"]]


def test_parquet_gives_its_column(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"document {number}\nsecond line" for number in range(1000)]
    table = pyarrow.table({"body": [*texts, None], "other": [0] * 1001})
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    content = read_all(f"{path}#field=body")
    assert content.documents == [(0, text.split("\n")) for text in texts]
    assert content.dropped == {"documents without text": 1}
    with pytest.raises(UserError, match=rf"^{path}: .*'text'; .* body, other$"):
        read(path)
    with pytest.raises(UserError, match=rf"^{path}: record 1 .*int"):
        read(f"{path}#field=other")


def test_tensorflow_data_sets_are_read_without_tensorflow(tmp_path, monkeypatch):
    tiny_tfds.make(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    data_set.cache_clear()
    assert sorted(read("tfds:tiny_text")) == sorted(
        [f"Document {number}.", "Second line, naïve."] for number in range(500)
    )
    assert len(read("tfds:tiny_text:1.0.0#split=test#field=text")) == 3
    assert len(read("tfds:tiny_text#split=train[:10%],tfds:tiny_text#split=test")) == 53
    assert "tensorflow" not in __import__("sys").modules
    for source, facts in [
        ("tfds:tiny_tex", "split train: .*not found"),
        ("tfds:tiny_text#split=dev", "split dev: .*dev"),
        ("tfds:tiny_text#field=body", "#field=body .* text, title"),
    ]:
        with pytest.raises(UserError, match=rf"^{source.partition('#')[0]}, .*{facts}"):
            read(source)


@dataclass(frozen=True)
class Backwards(Records):
    """A format of a test's own: a record a file, its text from right to left."""

    suffixes = (".txet",)
    case: str = setting("as it is", "of letters", one_of("as it is", "upper"))

    def batches(self, name):
        text = Path(name).read_text()[::-1]
        yield [text.upper() if self.case == "upper" else text], 1.0


def test_a_format_is_a_class_in_a_dictionary(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "backwards", Backwards)
    path = tmp_path / "a.txet"
    path.write_text(".sniar tI")
    assert read(path) == [["It rains."]]
    assert read(f"{path}#case=upper") == [["IT RAINS."]]
    with pytest.raises(UserError, match=r"#documents= .*backwards; allowed: case, weight"):
        read(f"{path}#documents=line")
    with pytest.raises(UserError, match=r"case=lower; .*'as it is', 'upper'"):
        read(f"{path}#case=lower")


SOUND = b"fine\n\n"
RECORD = b'{"text": "fine"}\n'
# Without the time of day: part of a test's name, which must be the same in all test processes.
CUT = gzip.compress(SOUND * 9, mtime=0)[:-4]


@pytest.mark.parametrize(
    ("name", "content", "facts", "reason"),
    [
        ("a.txt", SOUND + b"na\xefve\n", "line 3 .*UTF-8: .* byte 2 ", "lines"),
        ("a.txt", SOUND + b"cut \xe6\xb0", "line 3 .*UTF-8: .* byte 4 ", "lines"),
        ("a.jsonl", RECORD + b'{"text": "a', "line 2.* not JSON", "JSON"),
        ("a.jsonl", RECORD + b'\n{"text": "\xff"}', "line 3.* not JSON", "JSON"),
        ("a.jsonl", RECORD + b"[" * 10**5, "line 2.* not JSON", "JSON"),
        ("a.jsonl", RECORD + b'{"txt": 1}', "line 2 .*'text'; .*'txt'", "field"),
        ("a.jsonl", RECORD + b'["text"]', "line 2 .*'text'; .*list", "field"),
        ("a.jsonl", RECORD + b'{"text": [1]}', "line 2 .*list", "no text"),
        ("a.jsonl", RECORD + b'{"text": "\\ud800"}', "line 2 .*UTF-8", "UTF-8"),
        ("a.gz", CUT, "beyond line 18: ", "end"),
        ("a.gz", SOUND, "at all: .", "end"),
        ("a.parquet", b"PAR1" * 10, "at all: .", "end"),
    ],
)
def test_damage_is_located_or_counted(tmp_path, name, content, facts, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: .*{facts}"):
        read(path)
    rest = read_all(path, "skip")
    assert all(document == ["fine"] for _, document in rest.documents)
    [(counted, count)] = rest.dropped.items()
    assert (count, reason in counted) == (1, True)
    assert len(rest.damage) == 1


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix != ".txt"])
def test_no_archive_ends_in_silence(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    numbers = [str(x) for x in np.random.default_rng(0).random(100_000)]
    whole = COMPRESS[suffix]("\n\n".join(numbers).encode())
    for damaged in (whole[:-20], whole[: len(whole) // 2], whole[:1000] + whole[1100:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^{path}: .*(beyond line \d+|at all): ."):
            read(path)
        kept = read_all(path, "skip").documents
        assert [line for _, [line] in kept] == numbers[: len(kept)]


def test_record_without_end_is_refused_or_counted(tmp_path):
    limits = Limits(read=3, part=8, document=64, record=100)
    path = tmp_path / "array.jsonl"
    path.write_text('{"text": "fine"}\n[' + '{"text": "never ends"}, ' * 20)
    with pytest.raises(UserError, match=rf"^{path}: .*beyond line 1: .*100 bytes .* line"):
        read(path, limits)
    content = read_all(path, "skip", limits)
    assert content.documents == [(0, ["fine"])]
    assert content.dropped == {"inputs that cannot be read to their end": 1}


def test_directories_and_links_to_nowhere_are_named_or_counted(tmp_path):
    (tmp_path / "text.txt").write_text("fine")
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    for name, facts in [("sub", "directory; .*/sub.txt/"), ("link", "at all: No such file")]:
        with pytest.raises(UserError, match=rf"^{tmp_path}/{name}\.txt.*{facts}"):
            read(f"{tmp_path}/{name}.txt")
    content = read_all(f"{tmp_path}/*.txt", "skip")
    assert content.documents == [(0, ["fine"])]
    assert content.dropped == {"inputs that cannot be read to their end": 2}


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("fine")

    def refuse(name):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(text, "opened", refuse)  # root may read what no one may
    with pytest.raises(UserError, match=rf"^{path}: .*at all: Permission denied$"):
        read(path)


def test_progress_says_rate_and_time_left(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 50)
    messages: list[str] = []
    passed = reader.logged(groups(parse(str(path)), TINY), "read", messages.append, seconds=-1.0)
    assert len(list(passed)) == len(messages) + 1  # nothing is known after the first
    assert messages[-1].startswith("read 100%, ")
    assert messages[-1].endswith("MB/s, 0 s left")
