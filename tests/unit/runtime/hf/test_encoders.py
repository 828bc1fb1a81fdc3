"""Models with an encoder: whose tokens a step computes, and of which requests."""

import pytest
import torch

from collect.errors import TraceError
from collect.recorder import check_recordable
from predictors.base import Signal
from runtime.hf.probes import Probes
from tests.builders.families.build import save_family, tiny_config
from tests.builders.families.table import FAMILIES
from tests.builders.listeners import ProbeLog
from tests.builders.served import serve


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_probes__encoder_and_decoder_have_steps_of_their_own(tmp_path, name):
    model = serve(save_family(tmp_path, FAMILIES[name]), budget="50%")
    tokens = torch.randint(4, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    with model.moecast:
        steps = ProbeLog()
        with Probes(model, {Signal.ROUTED}, steps):
            made = model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=1)
        begun = [[tokens_T.tolist(), of_T.tolist()] for tokens_T, of_T in steps.of("begin_step")]
        assert begun[0] == [tokens.ravel().tolist(), [0] * 5 + [1] * 5]
        assert begun[1:3] == [[made[:, step].tolist(), [0, 1]] for step in range(2)]
        where = [(name, layer) for name, layer, _ in steps.events if "input" not in name]
        one_step = [("begin_step", -1), ("routed", 0), ("end_step", -1)]
        assert where[:3] == one_step
        assert where[3:6] == [one_step[0], ("routed", 1), one_step[2]]

        steps = ProbeLog()
        with Probes(model, {Signal.ROUTED}, steps):
            model.generate(tokens, max_new_tokens=2, do_sample=False, num_beams=3)
            model(input_ids=tokens, decoder_input_ids=tokens[:, :2])
        requests = [requests_T.tolist() for _, requests_T in steps.of("begin_step")]
        assert requests[0] == [0] * 5 + [1] * 5
        assert requests[1] == [0, 0, 0, 1, 1, 1], "beams of a request are that request"
        assert requests[-2:] == [[2] * 5 + [3] * 5, [2, 2, 3, 3]]


def test_record__a_model_with_an_encoder_is_refused_in_words():
    with pytest.raises(TraceError, match="has an encoder"):
        check_recordable(tiny_config(FAMILIES["switch_transformers"]), [], None)
