"""The time of a recording is printed before it begins."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from collect.config import DataConfig, SourceKind
from collect.plan import EncodedPrompt, RecordingSettings
from collect.record import collect
from collect.recording import recording_settings
from collect.time_estimate import RecordingSpeed
from tests.builders.recordable import prompts_file, recordable


def test_unit_seconds__counts_padded_prompts_and_decode_steps_of_batches() -> None:
    settings = RecordingSettings(new_tokens=5, max_prompt_tokens=99, chat=False, batch_size=2)
    unit = [EncodedPrompt(i, "d", "s", (1,) * length) for i, length in enumerate((7, 2, 3))]
    # Batches of 2 and 3 tokens, and of 7: 2 x 3 + 7 padded tokens, 2 x 5 steps.
    speed = RecordingSpeed(prefill_token_seconds=10.0, decode_step_seconds=0.5)
    assert speed.unit_seconds(unit, settings) == 13 * 10 + 10 * 0.5


@pytest.mark.parametrize("is_large", [True, False])
def test_collect__tells_tokens_bytes_and_time_before_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """A recording that is over at once has no estimate, which would take as long."""
    out = io.StringIO()

    def stop(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("collect.recording.UnitRecorder.record", stop)
    data = DataConfig(
        name="letters",
        kind=SourceKind.JSONL,
        path=str(prompts_file(tmp_path / "prompts.jsonl", count=50)),
        min_chars=1,
        max_new_tokens=4,
    )
    settings = recording_settings(data, batch_size=2 if is_large else 50)
    with pytest.raises(InterruptedError):
        collect(
            recordable(tmp_path / "model"),
            data,
            folder=tmp_path / "trace",
            settings=settings,
            console=Console(file=out),
        )
    line = out.getvalue()
    assert "50 prompts to record in 1 of 1 parts, at most" in line
    assert "bytes (" in line
    assert ("per token), about " in line) is is_large
