"""The task of training a language model by reinforcement learning from rewards.

TRL's trainers do the training: GRPO (arXiv 2402.03300) and RLOO (arXiv 2402.14740). The model is
judged by the mean reward of its greedily decoded completions of the evaluation prompts.
"""

import importlib.util
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from carbonopt.core.dimensions import TrainingParams
from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed
from carbonopt.core.quality import REWARD
from carbonopt.core.refusals import hint
from carbonopt.spec.base_settings import Name, PublicName, Settings
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, may_be_other_than, values_of
from carbonopt.spec.trial_spec import Prepared
from carbonopt.spec.workload_settings import REWARDS, Dataset, ModelWorkload, SequenceLength
from carbonopt.train.client import Speaker
from carbonopt.train.failures import as_bad_input, refused
from carbonopt.train.models.model_kind import CAUSAL_LM
from carbonopt.train.tasks.task import Card, Evaluation, TrialRun
from carbonopt.train.tasks.trainer_task import TrainerTask

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, TrainingArguments

    from carbonopt.train.rewards import Rewards

# The GRPO paper's value; TRL's own default leaves the reference model out.
DEFAULT_KL_COEFFICIENT = 0.04
# Generation options that ask for several sequences for each prompt.
_MORE_THAN_ONE_EACH = {"num_return_sequences", "num_beams"}


class RewardSource(Settings):
    """A reward model's folder or hub name, or a function of the user's own, FILE.py:FUNCTION."""

    model: PublicName | None = None
    """A reward model's folder or hub name, as the task `reward` trains it."""

    python: Name | None = None
    """Or your own function, `FILE.py:FUNCTION`."""

    one_of = ("model", "python")

    def violations(self) -> dict[str, bool]:
        unnamed = self.python is not None and ":" not in self.python
        return {f"python must be FILE.py:FUNCTION, but is {self.python!r}": unnamed}

    @property
    def file(self) -> str | None:
        return None if self.python is None else self.python.rpartition(":")[0]


class PromptDataset(Dataset, extra="forbid"):
    builtin: Literal["python-docs"] | None = None
    prompt_column: Name = "prompt"
    """The column with texts, or with lists of messages for the tokenizer's chat template."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.prompt_column,)


class RLHFWorkload(ModelWorkload, extra="forbid"):
    task: Literal["rlhf"]
    algorithm: Literal["grpo", "rloo"] = "grpo"
    """The algorithm: [GRPO](https://arxiv.org/abs/2402.03300), or `rloo`,
    [RLOO](https://arxiv.org/abs/2402.14740)."""

    dataset: PromptDataset
    sequence_length: SequenceLength
    """The most tokens of a prompt."""

    max_completion_length: SequenceLength
    """Tokens of a completion in evaluations, and in training unless the space has
    `max_completion_length`."""

    reward: RewardSource
    """The reward that training raises: a reward model, or a function."""

    gold_reward: RewardSource | None = None
    """The gold reward: a model or a function of what you really want, for which `reward` is a
    proxy. It is shown beside the reward; optional."""

    temperature: float = 1.0
    """Sampling temperature of the completions to train on."""

    def violations(self) -> dict[str, bool]:
        untokenized = self.tokenizer is None and self.model.name_or_path is None
        return {
            "a model from_config has no tokenizer: give workload.tokenizer, such as {kind: char}": (
                untokenized
            ),
            f"temperature must be above 0, but is {self.temperature:g}": self.temperature <= 0,
        }


class RLHF(TrainerTask):
    settings = RLHFWorkload
    workload: RLHFWorkload
    qualities = (REWARD,)
    card = Card(
        "text-generation", "Text Generation", "a language model that has learnt from rewards"
    )
    model_kind = CAUSAL_LM
    imported_ahead = ("carbonopt.train.policy_trainers",)

    def check(self, space: Space, launch: Launch) -> None:
        check_installed("trl", "rlhf", "workload.task: rlhf")
        if space["num_generations"] is None:
            raise BadInput(
                "search.space.num_generations is missing: the task rlhf needs it, such as 8."
            )
        if (
            self.workload.training_arguments.get("use_vllm")
            and importlib.util.find_spec("vllm") is None
        ):
            raise BadInput(
                "workload.training_arguments.use_vllm needs vLLM, which is not installed; leave it"
                " out."
            )
        for key, source in {
            "reward": self.workload.reward,
            "gold_reward": self.workload.gold_reward,
        }.items():
            if source is not None and source.file is not None and not Path(source.file).is_file():
                raise BadInput(
                    f"workload.{key}.python: no file {source.file}; give FILE.py:FUNCTION."
                )

    def input_files(self) -> tuple[str, ...]:
        sources = (self.workload.reward, self.workload.gold_reward)
        return (
            *super().input_files(),
            *(source.file for source in sources if source and source.file),
        )

    @cached_property
    def rewards(self) -> "Rewards":
        from carbonopt.train.rewards import load_rewards

        return load_rewards(self.workload.reward, "reward")

    @cached_property
    def gold_rewards(self) -> "Rewards | None":
        from carbonopt.train.rewards import load_rewards

        gold = self.workload.gold_reward
        return None if gold is None else load_rewards(gold, "gold_reward")

    def check_weights(self, keys: Collection[str]) -> str | None:
        from carbonopt.train import rewards

        unused = super().check_weights(keys)
        for key in REWARDS:
            if key in keys and key in (names := self.workload.names_or_paths):
                with as_bad_input(key):
                    rewards.check_weights(names[key], key)
        return unused

    def prepare(self, space: Space, folder: PreparedFolder, fingerprint: str) -> Prepared:
        from carbonopt.train import imports
        from carbonopt.train.data import prompts, templates, tokens
        from carbonopt.train.models import generation_check, model, weights

        if may_be_other_than(space["output_layer"], "standard"):
            raise BadInput(
                "output_layer must be standard: TRL's trainers bring a fused one of their own."
            )
        workload, kind, length = self.workload, self.model_kind, self.workload.sequence_length
        sampling = self._sampling()
        with as_bad_input("dataset"):
            split = prompts.read_prompts(workload.dataset)
        with as_bad_input("tokenizer"):
            tokenizer = tokens.make_encoder(
                workload, *(part.plain_texts for part in split)
            ).tokenizer
            prompts.complete(tokenizer, can_grow=workload.model.from_config is not None)
            train, evaluation = (part.kept(tokenizer, length) for part in split)
        with as_bad_input("model"):
            config = model.model_config(kind, workload, tokenizer)
            self._check_positions(config, space)
            weights.check_weights(kind, workload.model, config)
            sampling.update(**generation_check.ONE_EACH, pad_token_id=tokenizer.pad_token_id)
            ways: list[dict[str, Any]] = [{**generation_check.GREEDY, "tokenizer": tokenizer}]
            if not workload.training_arguments.get("use_vllm"):
                ways.append({"generation_config": sampling})
            for options in ways:
                generation_check.check_generation(kind, workload.model, config, tokenizer, options)
            parameters = model.parameter_count(kind, config, workload.model.trust_remote_code)
        self.check_weights(REWARDS)
        for rewards in (self.rewards, self.gold_rewards):
            if rewards is not None:
                rewards(evaluation.texts[:2], ["a completion"] * len(evaluation.texts[:2]))
        train.save(folder.root / "train.json")
        evaluation.save(folder.root / "eval.json")
        tokens.save_tokenizer(tokenizer, workload, folder)
        model.save_config(config, folder, workload.model)
        dated = templates.note(tokenizer) if split[0].has_messages else ""
        return Prepared(
            fingerprint=fingerprint,
            train_examples=len(train.texts),
            eval_examples=len(evaluation.texts),
            vocab_size=len(tokenizer),
            model_parameters=parameters,
            notes=(*train.notes, *evaluation.notes, *filter(None, (dated,))),
            versions=imports.package_versions(),
        )

    def _sampling(self) -> "GenerationConfig":
        """Return the study file's options of generation, which TRL gives to transformers.

        TRL would notice a fault only when it generates.

        Raises:
            BadInput: if transformers doesn't know an option or refuses its value.
        """
        from transformers import GenerationConfig

        given = self.workload.training_arguments
        with refused(
            "workload.training_arguments is not what generating takes: {}.", ValueError, TypeError
        ):
            more = dict(given.get("generation_kwargs") or {})
            cache = {"cache_implementation": given.get("cache_implementation")}
            sampling = GenerationConfig(**(cache | more), do_sample=True, disable_compile=True)
        for key in (
            more.keys() - vars(GenerationConfig()).keys() | more.keys() & _MORE_THAN_ONE_EACH
        ):
            where = f"workload.training_arguments.generation_kwargs.{key}"
            if key in _MORE_THAN_ONE_EACH:
                raise BadInput(
                    f"{where} can't be given: one completion is sampled at a time; use"
                    " num_generations."
                )
            raise BadInput(f"unknown key {where}; {hint(key, sorted(vars(GenerationConfig())))}")
        return sampling

    def _check_positions(self, config: Any, space: Space) -> None:
        longest = max(
            [
                self.workload.max_completion_length,
                *map(int, values_of(space["max_completion_length"])),
            ]
        )
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < self.workload.sequence_length + longest:
            rule = (
                "sequence_length + max_completion_length must be at most the model's number of"
                " positions"
            )
            raise BadInput(
                f"{rule}, but got {self.workload.sequence_length} + {longest} and {positions}."
            )

    def arguments_class(self) -> "type[TrainingArguments]":
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.rloo_config import RLOOConfig

        is_grpo = self.workload.algorithm == "grpo"
        return GRPOConfig if is_grpo else RLOOConfig  # type: ignore[no-any-return]

    def arguments(self, params: TrainingParams) -> dict[str, Any]:
        kl_coefficient = (
            DEFAULT_KL_COEFFICIENT if params.kl_coefficient is None else params.kl_coefficient
        )
        return {
            "num_generations": params.num_generations,
            "max_completion_length": (
                params.max_completion_length or self.workload.max_completion_length
            ),
            "beta": kl_coefficient,
            "temperature": self.workload.temperature,
            "disable_dropout": True,  # likelihoods are compared with those of another forward pass
            "gradient_checkpointing": False,  # TRL's default is on
        }

    def trainer(self, run: TrialRun, model: Any, arguments: "TrainingArguments") -> Any:
        from carbonopt.train.policy_trainers import policy_trainer

        return policy_trainer(self, run, model, arguments)

    def before_training(self, run: TrialRun, trainer: Any) -> None:
        from carbonopt.train.policy_trainers import rewards_at_start

        trainer.start = rewards_at_start(self, run, trainer)

    def before_steps(self, run: TrialRun, trainer: Any, speaker: Speaker | None) -> None:
        trainer.speaker = speaker

    def evaluation_tokens(self, examples: int) -> int | None:
        return None  # texts are generated, too

    def evaluate(self, run: TrialRun, trainer: Any) -> Evaluation:
        from carbonopt.train.policy_trainers import evaluate

        return evaluate(self, run, trainer)

    def example_loss(self, model: "PreTrainedModel", folder: PreparedFolder) -> "torch.Tensor":
        import torch

        tokens = torch.zeros(
            2, self.workload.sequence_length, dtype=torch.int64, device=model.device
        )
        logits: torch.Tensor = model(input_ids=tokens).logits
        return logits.float().logsumexp(-1).sum()
