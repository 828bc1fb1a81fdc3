"""Accelerate's disk offload of the same model, all prompts as one batch.

Runs in the `accelerate` environment with modules of `benchmarks/peers/workers`, without moecast.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers" / "workers"))

import torch
from peer_worker import PeerRequest, package_versions, peak_resident_bytes, read_bytes
from with_accelerate import offloaded


def main(request_path: str, report_path: str) -> None:
    request = PeerRequest(**json.loads(Path(request_path).read_text()))
    model = offloaded(request)
    inputs = torch.tensor(request.prompts)  # of one length
    before, start = read_bytes(), time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=request.new_tokens,
            min_new_tokens=request.new_tokens,
            do_sample=False,
        )
    seconds = time.perf_counter() - start
    report = {
        "versions": package_versions(("accelerate", "torch", "transformers")),
        "seconds": seconds,
        "tokens_per_second": len(inputs) * request.new_tokens / seconds,
        "read_bytes": read_bytes() - before,
        "peak_resident_bytes": peak_resident_bytes(),
        "answers": output[:, inputs.shape[1] :].tolist(),
    }
    Path(report_path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
