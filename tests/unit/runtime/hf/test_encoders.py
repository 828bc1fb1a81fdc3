"""Models with an encoder: whose tokens a step computes, and of which requests."""

import pytest
import torch

from collect.errors import TraceError
from collect.recorder import UnitRecorder
from predictors.base import Signal
from runtime.hf.probes import Probes
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.listeners import NoopListener
from tests.builders.served import serve


class Steps(NoopListener):
    def __init__(self):
        self.events = []

    def begin_step(self, tokens_T, requests_T):
        self.events.append(["begin", tokens_T.tolist(), requests_T.tolist()])

    def routed(self, layer, *_):
        self.events.append(["routed", layer])

    def end_step(self):
        self.events.append(["end"])


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_probes__encoder_and_decoder_have_steps_of_their_own(tmp_path, name):
    model = serve(save_family(tmp_path, FAMILIES[name]), budget="50%")
    tokens = torch.randint(4, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    with model.moecast:
        steps = Steps()
        with Probes(model, {Signal.ROUTED}, steps):
            made = model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=1)
        encoder, *decoder = [event for event in steps.events if event[0] == "begin"]
        assert encoder == ["begin", tokens.ravel().tolist(), [0] * 5 + [1] * 5]
        assert decoder[0] == ["begin", made[:, 0].tolist(), [0, 1]]
        assert decoder[1] == ["begin", made[:, 1].tolist(), [0, 1]]
        names = [event[0] if event[0] != "routed" else event[1] for event in steps.events]
        assert names[:6] == ["begin", 0, "end", "begin", 1, "end"]

        steps = Steps()
        with Probes(model, {Signal.ROUTED}, steps):
            model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=3)
            model(input_ids=tokens, decoder_input_ids=tokens[:, :2])
        requests = [event[2] for event in steps.events if event[0] == "begin"]
        assert requests[0] == [0] * 5 + [1] * 5
        assert requests[1] == [0, 0, 0, 1, 1, 1], "beams of a request are that request"
        assert requests[-2:] == [[2] * 5 + [3] * 5, [2, 2, 3, 3]]


def test_record__a_model_with_an_encoder_is_refused_in_words(tmp_path):
    model = serve(save_family(tmp_path, FAMILIES["switch_transformers"]), budget="50%")
    with model.moecast, pytest.raises(TraceError, match="has an encoder"):
        UnitRecorder(model, None, [], None).check_model()
