"""Parts of predictors in zoo entries: arrays in one safetensors file, networks as ONNX files."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from predictors.base import Predictor, check_options
from predictors.errors import PredictorError
from predictors.spec import ModelSpec

if TYPE_CHECKING:
    from predictors.networks.network import Network

WEIGHTS = "weights.safetensors"
INPUT, OUTPUT = "hidden", "scores"
"""Names in a graph: `hidden [T, width]` to `scores [T, num_experts]`, float32."""

Shapes = Mapping[str, tuple[int | None, ...]]
"""Name of each array to its shape; None stands for any size."""
Paths = Mapping[Any, str]
"""Source of each network, such as its layer, to its file."""


class StoredPredictor(Predictor):
    """A predictor made of the arrays and the networks of its files.

    The constructor takes the networks, if the kind has any: a whole ONNX file for each source. Then
    come the arrays in the order of `shapes`, and options by keyword.
    """

    optional: ClassVar[frozenset[str]] = frozenset()
    """Arrays that may be missing, which are None then."""

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:  # noqa: ARG003
        """Returns the shapes of the arrays."""
        return {}

    @classmethod
    def graph_paths(cls, spec: ModelSpec) -> Paths:  # noqa: ARG003
        """Returns the files of the networks."""
        return {}

    @classmethod
    def empty(cls, spec: ModelSpec, **options: Any) -> Self:
        """Makes a predictor without observations: a cold start."""
        shapes = cls.shapes(spec).values()
        zeros = (np.zeros([size or 0 for size in shape], np.float32) for shape in shapes)
        return cls(spec, *zeros, **options)

    def arrays(self) -> Mapping[str, NDArray]:
        """Returns the arrays as they are stored."""
        return {}

    def open_networks(self, graphs: Mapping[Any, bytes]) -> "dict[Any, Network]":
        """Opens the networks and keeps their graphs; PredictorError if not all are there."""
        # Policies import predictors of arrays, and no code that computes networks.
        from predictors.networks.network import Network

        paths = self.graph_paths(self.spec)
        if set(graphs) != set(paths):
            missing = [path for source, path in paths.items() if source not in graphs]
            raise PredictorError(
                f"a {self.kind} predictor of {self.spec.num_layers} layers has {len(paths)} "
                f"networks; missing: {', '.join(missing[:3]) or 'none'}; got {len(graphs)}"
            )
        self._graphs = dict(graphs)
        return {source: Network(graph) for source, graph in graphs.items()}

    def open_layer_networks(
        self, graphs: Mapping[int, bytes], widths: Mapping[str, int]
    ) -> "dict[int, Network]":
        """Opens networks from inputs of these widths to the experts.

        Raises PredictorError for other shapes.
        """
        networks = self.open_networks(graphs)
        given = {name: [width] for name, width in widths.items()}
        wanted = given, {OUTPUT: [self.spec.num_experts]}
        for layer, network in networks.items():
            inputs, outputs = (
                {name: shape[1:] for name, shape in shapes.items()}
                for shapes in (network.inputs, network.outputs)
            )
            if (inputs, outputs) != wanted:
                raise PredictorError(
                    f"the {self.kind} network of layer {layer} maps {inputs} to {outputs}; "
                    f"{self.spec.model_id} needs {wanted[0]} to {wanted[1]}: "
                    "it was made for another model"
                )
        return networks

    def files(self) -> dict[str, bytes]:
        paths, arrays = self.graph_paths(self.spec), self.arrays()
        graphs = {path: self._graphs[source] for source, path in paths.items()}
        if not arrays:
            return graphs
        return graphs | {WEIGHTS: save({k: np.ascontiguousarray(v) for k, v in arrays.items()})}

    @classmethod
    def from_files(
        cls, spec: ModelSpec, files: Mapping[str, bytes], options: Mapping[str, Any]
    ) -> Self:
        shapes, paths = cls.shapes(spec), cls.graph_paths(spec)
        if not shapes and not paths and files:
            raise PredictorError(f"a {cls.kind} predictor has no files; got {sorted(files)}")
        graphs = {source: files[path] for source, path in paths.items() if path in files}
        arrays = cls._read_arrays(files, shapes) if shapes else {}
        return cls(
            spec,
            *([graphs] if paths else []),
            *(arrays.get(name) for name in shapes),
            **check_options(cls, options),
        )

    @classmethod
    def _read_arrays(cls, files: Mapping[str, bytes], shapes: Shapes) -> dict[str, NDArray]:
        """Reads the arrays.

        Raises PredictorError if one is missing, is not finite or, with both, has another shape.
        """
        if WEIGHTS not in files:
            raise PredictorError(
                f"a {cls.kind} predictor needs a file {WEIGHTS}; got {sorted(files)}"
            )
        try:
            arrays = load(files[WEIGHTS])
        except SafetensorError as error:
            raise PredictorError(
                f"{WEIGHTS} of the {cls.kind} predictor is damaged: {error}"
            ) from error
        for name, expected in shapes.items():
            if name not in arrays:
                if name in cls.optional:
                    continue
                raise PredictorError(
                    f"{WEIGHTS} of the {cls.kind} predictor has no tensor {name!r}"
                )
            got = arrays[name].shape
            if len(got) != len(expected) or any(
                want not in (None, size) for want, size in zip(expected, got, strict=True)
            ):
                raise PredictorError(
                    f"{name} of the {cls.kind} predictor has the shape {got}, expected {expected} "
                    "(None: any); it was made for another model"
                )
            if not np.isfinite(arrays[name]).all():
                raise PredictorError(f"{name} of the {cls.kind} predictor has infinities or NaN")
        return arrays
