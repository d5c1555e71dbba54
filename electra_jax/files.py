"""Files that are there as a whole or not at all, whatever happens while they are written."""

from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Writes a UTF-8 file into a directory that is made if missing; returns `path`."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Writes a file into a directory that is made if missing; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
    return path
