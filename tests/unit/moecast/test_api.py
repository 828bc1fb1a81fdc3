"""What `from moecast import ...` gives."""

from pathlib import Path

from moecast import Zoo, pull


def test_zoo__lists_the_entries_of_an_address() -> None:
    entries = Zoo.at("builtin").entries()
    assert entries["qwen2-moe-tiny/stride"].manifest.kind == "stride"


def test_pull__copies_an_entry_and_writes_its_folder(own_zoo: Path, tmp_path: Path) -> None:
    entry = pull("qwen2-moe-tiny/stride", zoo="builtin", output=tmp_path / "entry")
    assert entry.manifest.name == "qwen2-moe-tiny/stride"
    assert (tmp_path / "entry/manifest.json").is_file()
    assert "qwen2-moe-tiny/stride" in Zoo.at(str(own_zoo / "zoo")).entries()
