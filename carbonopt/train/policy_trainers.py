"""TRL's policy trainers in a trial.

Order of prompts, generation and loss are TRL's own; the evaluation is carbonopt's.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import use_adapter

from carbonopt.core.files import write_json
from carbonopt.core.trial import Prediction, Stage
from carbonopt.train import ranks
from carbonopt.train.client import Speaker
from carbonopt.train.data.packing import batches_of_rank
from carbonopt.train.data.prompts import Prompts
from carbonopt.train.data.tokens import saved_tokenizer
from carbonopt.train.models.generation_check import GREEDY, ONE_EACH
from carbonopt.train.optim.schedule import ScheduledTrainer
from carbonopt.train.speed.decoding import GRAPHED, install_token_graph
from carbonopt.train.tasks.task import Evaluation, TrialRun

if TYPE_CHECKING:
    from carbonopt.train.tasks.rlhf import RLHF

_SHOWN = 12  # number of completions in the report


class _Policy:
    """Additions to both of TRL's trainers: a generation stage and a reference at evaluations."""

    speaker: Speaker | None = None  # only rank 0 has one
    # replaced as a whole; rewards with which training began, by their names
    start: dict[str, float] = {}  # noqa: RUF012
    last_loss: torch.Tensor | None = None
    generated_tokens = 0  # tokens generated on this rank in training
    # replaced as a whole; options of `generate` for a CUDA graph
    graphed: dict[str, Any] = {}  # noqa: RUF012

    def keep_reference(self: Any, start: str, trusted: bool) -> None:
        """Load the reference model where TRL has none.

        TRL loads none if the loss has no divergence, but evaluations always report the divergence.
        """
        if self.ref_model is None and not _is_adapted(self.model):
            options = {"dtype": self.model.dtype, "trust_remote_code": trusted}
            self.ref_model = prepare_deepspeed(
                AutoModelForCausalLM.from_pretrained(start, **options), self.accelerator
            )

    @contextmanager
    def reference(self: Any) -> Iterator[Any]:
        """Yield the model with which training began."""
        if not _is_adapted(self.model):
            yield self.ref_model
            return
        # adapters have no effect when training begins
        with use_adapter(self.accelerator.unwrap_model(self.model), None):
            yield self.model_wrapped

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss: Any = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        self.last_loss = loss.detach()
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counting is slow, see training_loop.TrialTrainer

    def _generate_single_turn(self: Any, *arguments: Any, **options: Any) -> Any:
        # All of the first step is one stage: what a step costs is told from the others.
        speaker = self.speaker if self.state.global_step else None
        if speaker is not None:
            speaker.stage(Stage.GENERATION)
        made = super()._generate_single_turn(*arguments, **options)  # type: ignore[misc]
        # GRPO returns completions with their likelihoods
        completions = made[0] if isinstance(made, tuple) else made
        self.generated_tokens += sum(map(len, completions))
        ranks.wait_for_device()
        if speaker is not None:
            speaker.stage(Stage.STEPS)
        return made


class _GRPO(_Policy, ScheduledTrainer, GRPOTrainer): ...


class _RLOO(_Policy, ScheduledTrainer, RLOOTrainer): ...


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def policy_trainer(task: "RLHF", run: TrialRun, model: Any, arguments: Any) -> Any:
    """Return this rank's trainer, on all training prompts."""
    workload = task.workload
    start = workload.model.name_or_path
    if start is None:
        # TRL loads the reference by its name, which a model made from a configuration lacks.
        start = str(Path(run.spec.trial_dir) / "start")
        if ranks.rank() == 0:
            model.save_pretrained(start)
        ranks.together()
    model.config._name_or_path = start
    tokenizer = saved_tokenizer(workload, run.folder, padding_side="left", truncation_side="left")

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return task.rewards(prompts, completions)

    kind: Any = _GRPO if workload.algorithm == "grpo" else _RLOO
    texts = Prompts.load(run.folder.root / "train.json").texts
    trainer = kind(
        model=model,
        reward_funcs=[reward],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )
    if not arguments.use_vllm:
        trainer.generation_config.update(**ONE_EACH)  # stronger than the model's own
    trainer.keep_reference(start, workload.model.trust_remote_code)
    ranks.together()
    if workload.model.name_or_path is None and ranks.rank() == 0:
        shutil.rmtree(start)
    partitioned = run.spec.params.zero_stage == 3 and not arguments.ds3_gather_for_generation
    if (
        not partitioned
        and "cache_implementation" not in workload.training_arguments
        and install_token_graph(model)
    ):
        trainer.graphed = GRAPHED
        trainer.generation_config.update(**GRAPHED)
    return trainer


def rewards_at_start(task: "RLHF", run: TrialRun, trainer: Any) -> dict[str, float]:
    """Return the reward and the gold reward before the first step.

    Trials that begin with the same weights share them: the first one writes them to the prepared
    folder.
    """
    random = task.workload.model.name_or_path is None
    path = run.folder.root / (f"start-{run.spec.seed}.json" if random else "start.json")
    known = ranks.gathered(
        json.loads(path.read_bytes()) if ranks.rank() == 0 and path.exists() else None
    )[0]
    if known is not None:
        return dict(known)
    evaluation = evaluate(task, run, trainer)
    values = {
        "start_reward": evaluation.sum / evaluation.count,
        "start_gold_reward": evaluation.others.get("gold_reward"),
    }
    known = {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }
    if ranks.rank() == 0:
        write_json(path, known)
    return known


@torch.no_grad()
def evaluate(task: "RLHF", run: TrialRun, trainer: Any) -> Evaluation:
    """Evaluate by greedy decoding of all evaluation prompts.

    Returns:
        The sum of rewards and the number of prompts. Others are the gold reward, the divergence
        from the start in nats a completion (the sum over its tokens of KL(policy ‖ start), whole
        distributions), a completion's tokens, the tokens that training has generated so far, and
        the rewards at the start.
    """
    tokenizer, texts = trainer.processing_class, Prompts.load(run.folder.root / "eval.json").texts
    own: dict[int, tuple[str, float, int]] = {}  # completion, divergence and tokens, by prompt
    engine = trainer.model_wrapped
    engine.eval()
    for places in batches_of_rank(
        len(texts), run.eval_batch_size_per_gpu, ranks.rank(), ranks.world_size()
    ):
        batch = [texts[max(place, 0)] for place in places]
        prompts, completions = _greedy(trainer, batch, task.workload.max_completion_length)
        moved = trainer.state.global_step > 0
        divergences = _divergences(trainer, prompts, completions) if moved else [0.0] * len(batch)
        written = tokenizer.batch_decode(completions, skip_special_tokens=True)
        for place, text, divergence, ids in zip(
            places, written, divergences, completions, strict=True
        ):
            if place >= 0:
                own[int(place)] = text, divergence, len(ids)
    engine.train()
    asked, said = [texts[place] for place in own], [text for text, _, _ in own.values()]
    sums = [sum(task.rewards(asked, said)) if own else 0.0]
    sums += [
        sum(divergence for _, divergence, _ in own.values()),
        float(sum(count for _, _, count in own.values())),
    ]
    sums.append(float(trainer.generated_tokens))
    if task.gold_rewards is not None:
        sums.append(sum(task.gold_rewards(asked, said)) if own else 0.0)
    rewards, divergence, tokens, generated, *gold = ranks.summed(sums)
    count = len(texts)
    others = {
        "kl_nats": divergence / count,
        "completion_tokens": tokens / count,
        "generated_tokens": generated,
    }
    others |= trainer.start
    if gold:
        others["gold_reward"] = gold[0] / count
    shown = {place: own[place][0] for place in range(min(_SHOWN, count)) if place in own}
    parts = ranks.gathered(shown)
    predictions = tuple(
        Prediction(source=texts[place][-300:], expected="", predicted=text[:300])
        for place, text in sorted(item for part in parts for item in part.items())
    )
    ends = trainer.state.global_step >= run.total_steps
    return Evaluation(rewards, count, others, predictions if ends else ())


def _greedy(trainer: Any, texts: list[str], most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids of the prompts and of their greedy completions with the end token."""
    tokenizer, device = trainer.processing_class, ranks.device()
    prompts = tokenizer(text=texts)["input_ids"]
    given = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(
        device
    )
    gathers = trainer.args.ds3_gather_for_generation
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, gathers) as model:
        ends = {tokenizer.eos_token_id}
        made = model.generate(
            **given,
            max_new_tokens=most,
            tokenizer=tokenizer,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(ends),
            **GREEDY,
            **trainer.graphed,
        )
    completions = []
    for row in made[:, given["input_ids"].shape[1] :].tolist():
        length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        completions.append(row[:length])
    return prompts, completions


def _divergences(
    trainer: Any, prompts: list[list[int]], completions: list[list[int]]
) -> list[float]:
    """Return the divergence of each completion from the reference, in nats.

    Rows begin with their prompt, so that positions are the same in every model.
    """
    device = ranks.device()
    rows = [
        torch.tensor(prompt + completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    tokens = pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
    begins = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
    places = torch.arange(tokens.shape[1], device=device)[None]
    given = {"input_ids": tokens, "attention_mask": (places < lengths).long()}
    policy = trainer.model_wrapped(**given).logits.float().log_softmax(-1)
    with trainer.reference() as model:
        start = model(**given).logits.float().log_softmax(-1)
    # divergence of the token after each position
    of_each = (policy.exp() * (policy - start)).sum(-1)
    counts = (places >= begins - 1) & (places < lengths - 1)
    return (of_each * counts).sum(1).tolist()  # type: ignore[no-any-return]
