"""What `from moecast import ...` gives."""

from pathlib import Path

from moecast import Zoo, pull


def test_pull__copies_an_entry(own_zoo: Path) -> None:
    assert pull("qwen2-moe-tiny/stride", zoo="builtin").manifest.name == "qwen2-moe-tiny/stride"
    assert "qwen2-moe-tiny/stride" in Zoo.at(str(own_zoo / "zoo")).entries()
