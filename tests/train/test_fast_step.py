"""The end of a DeepSpeed engine's steps: what replaces DeepSpeed's own does the same."""

import json
import subprocess
import sys

import pytest

from carbonopt.engines.process.environment import Ranks, work_environment
from carbonopt.spec.launch_settings import LocalLaunch

# A small model with two groups of parameters, one of which gets no gradient; two micro batches a
# step.
TRAIN = """
import json, sys
import deepspeed, torch
from carbonopt.train.speed.fast_step import install_fast_step

def train(stage, precision, clip, hastened, search=False):
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(50, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 50)]
    model = torch.nn.Sequential(*layers)
    model.idle = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [one for one in model.parameters() if (one.ndim > 1) == wide], "weight_decay": 0.1 * wide}
              for wide in (True, False)]
    config = {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2,
        "gradient_clipping": clip, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": search},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    if hastened:
        install_fast_step(engine, 1)
    if search:
        return "step" in vars(engine.optimizer)
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(20):
        x = torch.randint(0, 50, (16, 8), generator=data)
        loss = torch.nn.functional.cross_entropy(engine(x).float().flatten(0, 1), ((x * 7 + 3) % 50).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses

cases = [(stage, precision, clip) for stage in (0, 1) for precision in ("bf16", "fp32") for clip in (0.05, 0.0)]
found = [[*case, train(*case, False), train(*case, True)] for case in cases]
assert not train(0, "bf16", 1.0, True, search=True), "the study asks for the search"
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """With DeepSpeed's own end of steps and with the faster one, by ZeRO stage, precision and
    clipping.
    """
    out = tmp_path_factory.mktemp("steps") / "losses.json"
    launch = LocalLaunch(kind="local", gpus=[])
    environment = {**work_environment(launch, ()), **Ranks.alone(launch.world_size).environments[0]}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(out)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())
    return {(stage, precision, clip): (own, faster) for stage, precision, clip, own, faster in rows}


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_without_zero_torch_clips_as_deepspeed_does(losses, clip):
    own, faster = losses[0, "fp32", clip]
    assert own[-1] < own[0] - 2
    assert faster == pytest.approx(own, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_bf16_without_zero_trains_as_with_it(losses, clip):
    with_zero, untouched = losses[1, "bf16", clip]
    assert untouched == with_zero
    assert losses[0, "bf16", clip][1] == pytest.approx(with_zero, rel=0.01)
