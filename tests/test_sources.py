import os

import fsspec
import pytest

from electra_jax.data import sources
from electra_jax.data.opening import open_file
from electra_jax.data.sources import Source, changed, fingerprint, inputs, parse, weights
from electra_jax.errors import UserError

TEXT = "It rains.\nCome in.\n\n\n  Yes. \n"


def names(source: str) -> list[str]:
    return [input.name for input in inputs(parse(source))]


def test_entries_have_options_and_weights():
    entries = parse(" a/*.jsonl.gz #field=body#weight=3 , tfds:wiki/en:1.0.0#split=x#weight=0.5,")
    assert entries == [
        Source("a/*.jsonl.gz", (("field", "body"),), 3.0),
        Source("tfds:wiki/en:1.0.0", (("split", "x"),), 0.5),
    ]
    assert weights(entries) == (3.0, 0.5)
    assert str(entries[0]) == "a/*.jsonl.gz#field=body"  # the weight changes no token
    assert weights(parse("a,b")) is None


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        (" , ", "' , '; .*'docstrings' or files"),
        ("a.txt#feld=x", r"'a\.txt#feld=x' .*'feld=x'; .*documents=, field=, split=, weight="),
        ("a.txt#field=", "'field='"),
        ("a.txt#documents=word", "documents=word; .*'blank_line', 'line', 'file'"),
        *((f"a.txt#weight={bad}", "weight=.* above 0") for bad in ("0", "nan", "inf", "much")),
        ("a.txt#weight=1,b.txt", r"b\.txt .*#weight="),
    ],
)
def test_mistakes_in_a_source_are_named(source, facts):
    with pytest.raises(UserError, match=rf"^data\.source: .*{facts}"):
        parse(source)


def test_files_come_sorted_and_once(tmp_path):
    for name in "bac":
        (tmp_path / f"{name}.txt").write_text(name)
    found = names(f"{tmp_path}/c.txt, {tmp_path}/*.txt")
    assert [os.path.basename(name) for name in found] == ["c.txt", "a.txt", "b.txt"]


def test_format_follows_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where names of formats are names of files, too
    formats = {
        "a.txt": "Text",
        "c.XZ": "Text",
        "d.jsonl": "JsonLines",
        "docstrings.json.txt": "Text",
        "e.ndjson.zst": "JsonLines",
        "f.JSONL.gz": "JsonLines",
        "g.parquet": "Parquet",
        "parquet": "Text",
    }
    for name in formats:
        (tmp_path / name).touch()
    found = inputs(parse(",".join(formats) + ",docstrings,tfds:a"))
    assert {input.name: type(input.format).__name__ for input in found} == {
        **formats,
        "docstrings": "Docstrings",
        "tfds:a": "TensorFlowDataSet",
    }


@pytest.mark.parametrize("source", ["nowhere/*.txt", "pyproject.tom", "memory://nowhere/*.txt"])
def test_no_match_names_the_field(source):
    with pytest.raises(UserError, match=rf"^data\.source: .*'{source.replace('*', '.')}'"):
        inputs(parse(source))


def test_option_that_has_no_meaning_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"#field= .*a\.txt.* text; allowed: documents, weight$"):
        inputs(parse(f"{tmp_path}/*.txt#field=body"))
    with pytest.raises(UserError, match=r"#documents= .*docstrings; allowed: weight$"):
        inputs(parse("docstrings#documents=line"))


def test_addresses_go_through_fsspec():
    bucket = fsspec.filesystem("memory")
    bucket.pipe({"/bucket/b.txt": b"b", "/bucket/a.jsonl": b"{}", "/bucket/deep/c.txt": b"c"})
    assert names("memory://bucket/*") == ["memory:///bucket/a.jsonl", "memory:///bucket/b.txt"]
    [c] = inputs(parse("memory://bucket/deep/*"))
    assert open_file(c.name).read() == b"c"
    before = fingerprint(parse("memory://bucket/deep/*"))
    bucket.pipe("/bucket/deep/c.txt", b"d")
    assert changed(parse("memory://bucket/deep/*"), before) == "memory:///bucket/deep/c.txt"


@pytest.mark.parametrize(("address", "reason"), [("gs://a/b", "gcsfs"), ("xyz://a/b", "xyz")])
def test_address_that_cannot_be_served_says_why(address, reason, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UserError, match=rf"^{address}: .*{reason}"):
        inputs(parse(address))


def test_fingerprint_of_files_sees_any_change_of_their_ends(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    entries = parse(f"{tmp_path}/*.txt")
    before = fingerprint(entries)
    assert changed(entries, before) is None

    path.touch()
    assert fingerprint(entries) == before
    path.write_text(TEXT.replace("Yes", "Not"))  # the same size
    assert changed(entries, before) == str(path)
    path.unlink()
    assert changed(entries, before) is None
    new = tmp_path / "more.txt"
    new.write_text(TEXT)
    assert changed(entries, before) == str(new)


def test_only_versions_name_a_corpus_before_it_is_read(tmp_path):
    (tmp_path / "a.txt").touch()
    [found] = sources.versions(parse(f"{tmp_path}/a.txt,gone.txt,docstrings"))
    assert found["name"] == "docstrings"
    assert found["packages"]
