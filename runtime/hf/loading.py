"""Loads models through Transformers: stripped of their experts, or whole as the reference."""

import copy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from predictors.spec import ModelSpec
from runtime.config import DecodeKernels, DenseFormat, Exact, ModelConfig, PageCache, StoreConfig
from runtime.errors import CheckpointError, StoreError
from runtime.hf import experts as experts_function
from runtime.hf.decode_step import apply_decode_threads, apply_kernels
from runtime.hf.dense_format import (
    FileRows,
    apply_dense_format,
    fill_last,
    keep_file_types,
    place_together,
)
from runtime.hf.experts import multiplies_rows, runs_our_loop
from runtime.hf.generation_settings import settle_generation
from runtime.hf.gguf import apply_rope_factors, choose_dtype, lay_out_rows, open_dense, plan_layers
from runtime.hf.gguf_config import read_gguf_config
from runtime.hf.grouped import QUANTISED, choose_exact, find_model_obstacle
from runtime.hf.growing_cache import append_in_place
from runtime.hf.layers import MoeLayer, attach_experts, find_moe_layers, find_top_k, sample_routers
from runtime.hf.linear import convert_linears
from runtime.hf.model_faults import (
    explain_loading,
    refuse_mismatched,
    refuse_missing,
    without_tables,
)
from runtime.hf.small_steps import convert_small_steps
from runtime.hf.strip import (
    Banks,
    list_taken_parameters,
    make_checked_class,
    make_stripped_class,
    open_safetensors,
)
from runtime.store.base import ExpertStore, OnDemandReader, max_slot_bytes
from runtime.store.checkpoint import CheckpointStore, has_blocks
from runtime.store.files import ALIGNMENT, FileReader
from runtime.store.ggml.library import find_products
from runtime.store.gguf.header import is_gguf, read_header
from runtime.store.integer_scheme import METHODS, IntegerScheme, find_scheme
from runtime.store.model_check import CONFIG, DEQUANTISED, read_config_file
from runtime.store.model_source import has_no_experts, identity, resolve
from runtime.store.weight_plan import FusedParameter, WeightPlan


@dataclass(frozen=True)
class StrippedModel:
    """A model without its experts, and where the checkpoint has them."""

    model: PreTrainedModel
    layers: list[MoeLayer]
    plans: list[dict[str, WeightPlan]]
    """Weight plans of each layer's experts, by parameter; none for a folder without experts."""
    folder: Path
    unused: frozenset[str] = frozenset()
    """Names of the checkpoint's tensors that are no part of the model."""

    def open_store(
        self, *, page_cache: PageCache = PageCache.BYPASS, decodes: bool = False
    ) -> ExpertStore:
        """Return a store that reads the experts from the checkpoint, in place.

        Args:
            decodes: quantised experts are decoded as they are read, not as they are used; those of
                a GGUF file never are.

        Raises:
            CheckpointError: the folder has a model without its experts.
        """
        if not self.plans:
            raise CheckpointError(explain_no_experts(self.folder))
        files, decodes = FileReader(page_cache=page_cache), decodes and not is_gguf(self.folder)
        store = CheckpointStore(self.model, self.plans, files, decodes=decodes)
        self._use_kernels(store, [self.model.device])
        return store

    def open_experts(
        self, config: StoreConfig, spec: ModelSpec, devices: Sequence[torch.device]
    ) -> ExpertStore:
        """Return the store of a command: the packed one that it names, or the checkpoint.

        Raises:
            StoreError: no store, or one of another model.
            CheckpointError: as `open_store`.
        """
        if config.path is None:
            return self.open_store(page_cache=config.page_cache)
        # Imported here because pydantic takes 5 MiB, which reads in place do not need.
        from runtime.store.packed.store import open_store

        store = open_store(config.path, spec, checkpoint=self.folder, page_cache=config.page_cache)
        self._fit(store)
        self._use_kernels(store, devices)
        return store

    def _fit(self, store: ExpertStore) -> None:
        """Let the model compute with the store's matrices.

        Raises:
            StoreError: they are of another model.
        """
        flips, same_depth = self.multiplies_columns, store.num_layers == len(self.layers)
        counts = store.experts_per_layer
        for layer, layout, count in zip(self.layers, store.layouts, counts, strict=False):
            parameters = list_taken_parameters([layer])
            own = {parameter.name: parameter.shape[1:] for parameter in parameters}
            num_experts = max(parameter.num_experts for parameter in parameters)
            is_flipped = layout.is_flipped and flips
            found = {n: s[::-1] if is_flipped else s for n, s in layout.shapes.items()}
            if not same_depth or (found, count) != (own, num_experts):
                raise StoreError(
                    f"the store has {store.num_layers} layers, of {count} experts of the shapes "
                    f"{found}, this model {len(self.layers)}, of {num_experts} of {own}; pack this "
                    "model: moecast pack model=... output=PATH"
                )
            if layout.is_flipped:
                layer.experts.is_transposed = False

    def read_on_demand(
        self, store: ExpertStore, config: ModelConfig, *, keep_bytes: int = 0
    ) -> PreTrainedModel:
        """Let the model compute with experts that it reads itself: without arena and threads.

        Args:
            keep_bytes: memory for experts that are read first, and stay.
        """
        attach_experts(self.layers, OnDemandReader(store, keep_bytes=keep_bytes))
        apply_decode_threads(self.model, config.decode_threads, expert_bytes=max_slot_bytes(store))
        return self.model

    def _use_kernels(self, store: ExpertStore, devices: Sequence[torch.device]) -> None:
        on_host = all(multiplies_rows(layer.experts) for layer in self.layers)
        is_host = all(device.type == "cpu" for device in devices)
        store.use_kernels(wanted=on_host and is_host, on_host=on_host)

    @cached_property
    def multiplies_columns(self) -> bool:
        """Whether the model has matrices `(inputs, outputs)`, and would compute with others too.

        It is found out once, before a store changes what the model multiplies by.
        """
        return all(
            runs_our_loop(layer.experts) and layer.experts.is_transposed for layer in self.layers
        )

    @property
    def holds_integers(self) -> bool:
        """Whether slots hold integers although no store was packed."""
        return has_blocks(self.plans)

    def spec(self, folder: Path, config: ModelConfig) -> ModelSpec:
        """Return what predictors of this model must match."""
        hidden_size = self.model.config.get_text_config().hidden_size
        return ModelSpec(
            **identity(folder, config),
            num_layers=len(self.layers),
            num_experts=max(layer.num_experts for layer in self.layers),
            top_k=find_top_k(self.model, self.layers),
            hidden_size=hidden_size,
            dtype=str(self.model.dtype).removeprefix("torch."),
            routers=sample_routers(self.layers, hidden_size=hidden_size),
            base=config.base,
        )


def read_config(folder: Path) -> PreTrainedConfig:
    """Read a checkpoint's configuration; code that it brings is never run.

    Raises:
        CheckpointError: this Transformers has no such model, or the configuration is damaged.
    """
    if is_gguf(folder):
        return read_gguf_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Configuration classes raise exceptions of every type for values that they do not expect.
    except Exception as error:
        raw = read_config_file(folder)
        kind, saved = raw.get("model_type"), raw.get("transformers_version")
        if isinstance(kind, str) and kind in CONFIG_MAPPING:
            raise CheckpointError(
                f"{folder / CONFIG} is damaged ({' '.join(str(error).split())}); fetch it again"
            ) from error
        here = f"Transformers {transformers.__version__}, which is installed here, has no model "
        if raw.get("auto_map"):
            raise CheckpointError(
                f"{folder}: {here}of type {kind!r}, and code that a checkpoint brings (auto_map in "
                "config.json) is never run. Look for a version of this model in Transformers' own "
                "format, or for a moecast with a newer Transformers"
            ) from error
        newer = f" (the checkpoint was saved with {saved})" if saved else ""
        raise CheckpointError(
            f"{folder}: {here}of type {kind!r}{newer}. This is the version that moecast supports; "
            "look for a newer moecast. docs/families.md lists the models that it serves"
        ) from error


def load_stripped(
    folder: Path,
    dtype: str,
    device: torch.device | str = "cpu",
    *,
    decode_kernels: DecodeKernels = DecodeKernels.AUTO,
    dense_format: DenseFormat = DenseFormat.OWN,
    exact: Exact = Exact.AUTO,
) -> StrippedModel:
    """Load a model without its experts: no byte of them is read.

    Args:
        dense_format: of linear layers outside of the experts.
        exact: refused before anything is read if the model cannot have it.

    Raises:
        CheckpointError: no model class for it, no experts, or damaged files.
    """
    experts_function.register()
    device = torch.device(device)
    header = read_header(folder) if is_gguf(folder) else None
    if header is not None:
        choose_exact(exact, device, QUANTISED)
    config = read_config(folder)
    indexed: Banks = {}
    unused: set[str] = set()
    kept: FileRows = []
    with explain_loading(folder), progress_bars():
        cls, config = find_model_class(config)
        scheme = take_scheme(folder, config)

        def open_tensors(
            model: PreTrainedModel, parameters: list[FusedParameter], *args: Any
        ) -> AbstractContextManager[dict[str, Any]]:
            find_top_k(model, find_moe_layers(model))
            if header is not None:
                tensors = open_dense(header, model)
                keeps = device.type == "cpu" and dense_format is DenseFormat.OWN
                # In float32 a file's weights are computed with as they are.
                keeps &= model.dtype is not torch.float32 and find_products() is not None
                return keep_file_types(model, tensors, kept) if keeps else tensors
            obstacle = find_model_obstacle(model) if scheme is None else QUANTISED
            choose_exact(exact, device, obstacle)
            return open_safetensors(indexed.update, unused, scheme, model, parameters, *args)

        own = dtype
        if header is not None and dtype == "auto":
            own = choose_dtype(header)
        model = _from_pretrained(
            make_stripped_class(cls, open_tensors),
            folder,
            config,
            dtype=own,
            experts_implementation=experts_function.IMPLEMENTATION,
        )
    while kept:
        fill_last(kept)
    settle_generation(model, folder)
    model.__class__ = cls
    model = move_to(unmap_weights(model, mapped=False), device).eval()
    apply_kernels(model, decode_kernels)
    layers = find_moe_layers(model)
    apply_dense_format(model, layers, dense_format)
    place_together(model)
    if model.device.type == "cpu":
        convert_linears(model)
        convert_small_steps(model)
        append_in_place()
    if header is None:
        plans = [indexed[layer.name] for layer in layers if indexed]
    else:
        apply_rope_factors(header, model)
        lay_out_rows(layers)
        plans = plan_layers(header, layers)
    return StrippedModel(model, layers, plans, folder, frozenset(unused))


def load_configured(config: ModelConfig, device: torch.device | str = "cpu") -> StrippedModel:
    """Load the model of a command without its experts; raises as `load_stripped`."""
    return load_stripped(
        resolve(config),
        config.dtype,
        device,
        decode_kernels=config.decode_kernels,
        dense_format=config.dense_format,
        exact=config.exact,
    )


def _from_pretrained(
    cls: type[PreTrainedModel],
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: str | torch.dtype,
    experts_implementation: str,
) -> PreTrainedModel:
    """Load with Transformers; a class that opens tensors itself gets no files of a GGUF model.

    Raises:
        CheckpointError: the checkpoint has no tensor for a parameter, or one of another shape.
    """
    given: dict[str, Any] = {"state_dict": {}} if is_gguf(folder) else {}
    is_quantised = getattr(config, "quantization_config", None) is not None
    is_name = isinstance(dtype, str) and dtype != "auto"
    with without_tables():
        model, found = cls.from_pretrained(
            None if is_gguf(folder) else folder,
            config=config,
            dtype=getattr(torch, str(dtype)) if is_name else dtype,
            experts_implementation=experts_implementation,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **given,
        )
    refuse_mismatched(folder, found["mismatched_keys"])
    refuse_missing(folder, found["missing_keys"])
    # Of a quantised checkpoint, the library casts what it dequantises, and not the other weights.
    for parameter in model.parameters() if is_quantised else ():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(model.config.dtype)
    return model


def take_scheme(folder: Path, config: PreTrainedConfig) -> IntegerScheme | None:
    """Take the quantisation out of a configuration if weights are packed integers; return it.

    Transformers then loads the model as if the checkpoint had the weights themselves.

    Raises:
        CheckpointError: a variant that is not served.
    """
    scheme = find_scheme(folder, getattr(config, "quantization_config", None))
    for part in (config, config.get_text_config()) if scheme is not None else ():
        vars(part).pop("quantization_config", None)
    return scheme


def build_skeleton(folder: Path, *, dtype: str) -> StrippedModel:
    """Build a stripped model of `config.json` on the meta device: shapes and no memory.

    Nothing but the configuration is read.

    Args:
        dtype: of parameters; a quantised checkpoint counts as dequantised.

    Raises:
        CheckpointError: no model class for it, no experts, or a damaged configuration.
    """
    config = copy.deepcopy(read_config(folder))
    config.__dict__.pop("quantization_config", None)
    with explain_loading(folder):
        cls, config = find_model_class(config)
        with torch.device("meta"):
            model = make_stripped_class(cls, _refuse_files)._from_config(
                config, dtype=getattr(torch, dtype)
            )
    return StrippedModel(model.eval(), find_moe_layers(model), [], folder)


def _refuse_files(*_: object) -> NoReturn:
    raise AssertionError("a skeleton reads no file")


def refuse_plain(folder: Path) -> None:
    """Raise CheckpointError for a model whose experts Transformers would compute differently."""
    if is_gguf(folder):
        raise CheckpointError(
            f"{folder}: Transformers dequantises GGUF files, which gives other bits than kernels "
            "for integers; compare with these instead: moecast verify "
            f"{shlex.quote(str(folder))}"
        )


def move_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model without its experts to a device.

    Raises:
        CheckpointError: the device has not so much memory.
    """
    num_bytes = count_weight_bytes(model)
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"the weights other than experts take {num_bytes} bytes, which {device} has not free; "
            "end what else uses its memory, or use device=cpu"
        ) from error


def load_plain(
    folder: Path, *, dtype: torch.dtype | str, decode_kernels: DecodeKernels = DecodeKernels.AUTO
) -> PreTrainedModel:
    """Load the whole model with Transformers' own eager experts: the reference for exactness.

    Raises:
        CheckpointError: the folder has a model without its experts, is damaged, or has a format
            that Transformers reads on other machines only.
    """
    refuse_plain(folder)
    if has_no_experts(folder):
        # Transformers would fill them with random numbers.
        raise CheckpointError(explain_no_experts(folder))
    config = read_config(folder)
    scheme = find_scheme(folder, getattr(config, "quantization_config", None))
    if scheme is not None:
        if scheme.method != "compressed-tensors" or find_spec("compressed_tensors") is None:
            raise CheckpointError(
                f"{folder}: Transformers does not read {METHODS[scheme.method]} checkpoints with "
                "what is installed here; moecast serves this one with its own code"
            )
        config.quantization_config["dequantize"] = True
    with explain_loading(folder), progress_bars():
        cls, config = find_model_class(config)
        checked = make_checked_class(cls, scheme)
        model = _from_pretrained(
            checked, folder, config, dtype=dtype, experts_implementation="eager"
        )
    model.__class__ = cls
    settle_generation(model, folder)
    model = unmap_weights(model).eval()
    apply_kernels(model, decode_kernels)
    return model


def explain_no_experts(folder: Path) -> str:
    return (
        f"{folder} has a model without its experts (moecast pack dense_output=), which are in the "
        "packed store of the same run only: give store.path=STORE, or, for what needs the "
        "checkpoint itself, the whole model"
    )


@contextmanager
def progress_bars() -> Iterator[None]:
    """Show Transformers' progress bars only where standard error is a terminal, not in logs."""
    is_enabled = logging.is_progress_bar_enabled()
    if is_enabled and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()


@torch.no_grad()
def unmap_weights(model: PreTrainedModel, *, mapped: bool = True) -> PreTrainedModel:
    """Copy every parameter out of the file that it may be mapped from; returns the model.

    A mapped page that cannot be read kills the process, and kernels take another path on a mapped
    tensor's unaligned address, which changes the last bits of a result. Parameters that share
    memory still do afterwards.

    Args:
        mapped: False where no file was mapped: then only what is unaligned is copied.
    """
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        address = parameter.data_ptr()
        if address not in copies:
            # Nothing on a device is mapped, and a copy would double its memory. PyTorch aligns its
            # own allocations on the CPU to `ALIGNMENT`.
            must_copy = parameter.device.type == "cpu" and (mapped or address % ALIGNMENT)
            copies[address] = parameter.data.clone() if must_copy else parameter.data
        parameter.data = copies[address]
    return model


def count_weight_bytes(model: PreTrainedModel) -> int:
    """Count the bytes of all parameters and buffers, shared memory once."""
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


GENERATING = (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)
"""Auto classes in order, for checkpoints that do not name their class."""

NAMED_ONLY = (AutoModelForTokenClassification,)
"""Models that generate nothing: only for checkpoints made for them."""


def _classes(config: PreTrainedConfig, auto: Any) -> tuple[type[PreTrainedModel], ...]:
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return ()
    classes = mapping[type(config)]
    return tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)


def find_model_class(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class, and the part of the configuration that it is built from.

    The checkpoint's own `architectures` come first: a model with vision is loaded with it, and one
    that was saved as a text model without. Next is the first that Transformers' auto classes know.

    Raises:
        CheckpointError: no class for this configuration that computes text.
    """
    generating = [cls for auto in GENERATING for cls in _classes(config, auto)]
    others = [cls for auto in NAMED_ONLY for cls in _classes(config, auto)]
    named = [cls for cls in generating + others if cls.__name__ in (config.architectures or ())]
    chosen = next(iter(named + generating), None)
    quantised = getattr(config, "quantization_config", None)
    if isinstance(quantised, dict) and quantised.get("quant_method") in DEQUANTISED:
        quantised["dequantize"] = True
    if chosen is None:
        raise CheckpointError(
            f"Transformers has no class that computes text for {type(config).__name__} "
            f"(architectures: {', '.join(config.architectures or ()) or 'none'})"
        )
    text = config.get_text_config()
    if text is not config and chosen.config_class is type(text):
        # As the auto classes do: a text class reads its part, and how the whole is quantised.
        if getattr(config, "quantization_config", None) is not None:
            text.quantization_config = config.quantization_config
        return chosen, text
    return chosen, config
