"""What is to be recorded and where to: the same in the process that asks and in every worker."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from collect.config import DataConfig, SourceKind
from collect.job import Job
from collect.plan import EncodedPrompt, Settings, encode, make_plan, units
from collect.prompts import load_prompts
from collect.traces.layout import ALL_SIGNALS, TraceSignal, row_bytes
from collect.traces.manifest import TracePlan, digest_of, has_manifest, read_manifest
from collect.traces.reader import Trace
from collect.traces.writer import TraceWriter
from predictors.spec import ModelSpec
from runtime.config import BUILTIN, ModelConfig
from runtime.store.model_source import identity, resolve


def settings_of(data: DataConfig, **options: Any) -> Settings:
    """Settings from the data's own lengths and `temperature`, `top_p`, `seed`, `batch_size`,
    `shard_bytes`.
    """
    return Settings(
        new_tokens=data.new_tokens,
        max_prompt_tokens=data.max_prompt_tokens,
        chat=data.chat,
        **options,
    )


def default_folder(
    model: ModelConfig, data: DataConfig, *, signals: Sequence[TraceSignal], settings: Settings
) -> Path:
    """runs/traces/MODEL/DATA-DIGEST: other settings, another folder."""
    asked = [vars(model), vars(data), list(signals), vars(settings)]
    return Path("runs", "traces", model.name, f"{data.name}-{digest_of(asked)[:8]}")


@dataclass(frozen=True)
class Order:
    """What is to be recorded, and where to; made anew by each worker from its JSON."""

    model: ModelConfig
    data: DataConfig
    where: str
    """Folder or address of the trace."""
    signals: tuple[TraceSignal, ...]
    settings: Settings
    budget: str

    def as_json(self) -> dict[str, Any]:
        """For a worker, which may run in another folder: paths are whole ones."""
        fields = {**asdict(self), "signals": list(self.signals), "where": whole_path(self.where)}
        fields["model"] |= {"id": whole_if_here(self.model.id)}
        if self.data.path is not None:
            fields["data"] |= {"path": whole_if_here(self.data.path)}
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Order":
        data = {**fields["data"], "kind": SourceKind(fields["data"]["kind"])}
        return cls(
            model=ModelConfig(**fields["model"]),
            data=DataConfig(**data),
            where=fields["where"],
            signals=tuple(TraceSignal(one) for one in fields["signals"]),
            settings=Settings(**fields["settings"]),
            budget=fields["budget"],
        )

    @cached_property
    def prompts(self) -> list[EncodedPrompt]:
        tokenizer = AutoTokenizer.from_pretrained(resolve(self.model), local_files_only=True)
        texts = load_prompts(self.data, seed=self.settings.seed)
        return encode(texts, tokenizer, self.settings)

    def planned(self, spec: ModelSpec) -> tuple[TracePlan, list[list[EncodedPrompt]]]:
        """The plan, and the prompts of each of its units."""
        work = units(self.prompts, self.settings, bytes_per_row=row_bytes(spec, self.signals))
        plan = make_plan(
            spec, signals=self.signals, data=self.data, settings=self.settings, work=work
        )
        return plan, work

    def finished(self) -> Trace | None:
        """The trace, when it is there already: no model is loaded."""
        prompts = self.prompts
        assert prompts, "a source without texts is an error of its own"
        spec = recorded_spec(
            self.where, identity(resolve(self.model), self.model), self.model.dtype
        )
        if spec is None or not read_manifest(self.where).complete:
            return None
        writer = TraceWriter(self.where, self.planned(spec)[0])
        return None if writer.missing() else writer.finish()

    def load(self) -> Job:
        """The model, loaded, and the work for it; its handle is the caller's to close."""
        from runtime import load

        # Before the model: a source that is not there is told at once.
        assert self.prompts, "a source without texts is an error of its own"
        model = load(self.model, budget=self.budget)
        return Job(model, *self.planned(model.moecast.spec), self.settings)


def whole_path(where: str) -> str:
    """An address as it is."""
    return where if "://" in where else str(Path(where).expanduser().resolve())


def whole_if_here(named: str) -> str:
    """A name that is no path on this machine, such as a repository's on the Hub, as it is."""
    is_path = named != BUILTIN and Path(named).expanduser().exists()
    return whole_path(named) if is_path else named


def order_of(
    model: ModelConfig,
    data: DataConfig,
    folder: Path | str,
    signals: Sequence[TraceSignal],
    settings: Settings | None,
    budget: str,
) -> Order:
    asked = tuple(signal for signal in ALL_SIGNALS if signal in signals)
    return Order(model, data, str(folder), asked, settings or settings_of(data), budget)


def recorded_spec(where: Path | str, identity: dict[str, str], dtype: str) -> ModelSpec | None:
    """Spec of the trace that lies there, when that trace is of this very model."""
    if not has_manifest(where):
        return None
    spec = read_manifest(where).plan.spec
    same = all(getattr(spec, name) == value for name, value in identity.items())
    return spec if same and dtype in ("auto", spec.dtype) else None
