"""Keeps what a predictor learns while it serves, across restarts."""

import logging
import time
from pathlib import Path

from predictors.base import Predictor
from predictors.errors import DiskFullError, MoecastError

log = logging.getLogger(__name__)

SAVE_SECONDS = 600.0
"""Time between two saves while serving: what a crash may lose."""


class LearnedStore:
    """A folder that holds the predictor as it was when it was last saved, as an entry of a zoo.

    MoE-Infinity (request level), section 5.3: "MoE-Infinity can checkpoint its EAMC [...]. Once
    recovered from the failure, it reloads the EAMC". Every save replaces the folder in one step.

    Args:
        folder: Folder to create; one that is there must be of the same kind and model.
        model: Name of the model.
    """

    def __init__(self, folder: Path, *, model: str):
        self._folder = folder
        self._model = model
        self._saved_at = time.monotonic()
        self._has_changed = False

    def restore(self, predictor: Predictor) -> Predictor:
        """Returns the saved predictor, with the options of `predictor`; that one if none is saved.

        Raises:
            MoecastError: the folder holds a predictor of another kind.
            ZooError: the folder is damaged, is for another model or holds something else.
        """
        from zoo.entry import open_entry
        from zoo.load import load_predictor

        if not self._folder.exists() or not any(self._folder.iterdir()):
            return predictor
        kind = open_entry(self._folder).manifest.kind
        if kind != predictor.kind:
            raise MoecastError(
                f"learned={self._folder}: it was learned by {kind}, the model is served with "
                f"{predictor.kind}. Name another folder"
            )
        restored = load_predictor(self._folder, spec=predictor.spec, options=predictor.options())
        restored.card = predictor.card
        return restored

    def step_ended(self, predictor: Predictor) -> None:
        """Records that the predictor may have learned something; saves it when that is due."""
        self._has_changed = True
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save(predictor)

    def save(self, predictor: Predictor) -> None:
        """Saves the predictor between two steps if there was one since the last time."""
        from zoo.entry import write_entry
        from zoo.manifest import name_entry

        if not self._has_changed:
            return
        self._has_changed = False
        self._saved_at = time.monotonic()
        try:
            write_entry(self._folder, predictor, name=name_entry(self._model, predictor.kind))
        except (OSError, DiskFullError) as error:
            log.warning("what the predictor learned was not saved to %s: %s", self._folder, error)
