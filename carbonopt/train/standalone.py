"""Trains the recommended configuration once more and says which perplexity it reaches. Needs no carbonopt.

    ./run.sh [--data FOLDER]

Reads workload.yaml (model, tokenizer, data), training_args.yaml (transformers.TrainingArguments) and ds_config.json
(DeepSpeed) from its own folder, and writes the trained model, its tokenizer and result.json into output/ there. What
inputs.json lists, if there is one, has to lie in data/ there or in FOLDER. steps.py, and output_layer.py if
workload.yaml names an output_layer, and batches.py if the trial trained on GPUs, lie beside it.
"""

import csv
import functools
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

FOLDER = Path(__file__).resolve().parent
OUTPUT = FOLDER / "output"
END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
IGNORED = -100  # a target that is not counted, as torch's cross entropy has it
FLOAT8_CAPABILITY = (8, 9)  # of a GPU
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def read_workload() -> dict[str, Any]:
    """workload.yaml, with the places of its files and folders instead of their names."""
    places = {}
    if (FOLDER / "inputs.json").exists():
        import inputs  # inputs.py, beside this file

        places = inputs.places(contents=RANK == 0)  # the others needn't read all of it, too
    workload = yaml.safe_load((FOLDER / "workload.yaml").read_bytes())

    def at(name: str) -> str:
        return places.get(name.removeprefix("./"), name)

    for part in ("model", "tokenizer", "dataset"):
        settings = workload.get(part, {})
        for key in settings.keys() & {"name_or_path", "train_files", "eval_files"}:
            value = settings[key]
            settings[key] = at(value) if isinstance(value, str) else [at(name) for name in value]
    return workload


def read_text(dataset: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The documents for training and for evaluation, empty ones left out."""
    column = dataset["text_column"]
    if "name_or_path" in dataset:
        from datasets import load_dataset

        loaded = load_dataset(dataset["name_or_path"], dataset.get("config"))
        splits = (loaded[dataset["train_split"]], loaded[dataset["eval_split"]])
        return tuple([text for text in split[column] if text] for split in splits)  # type: ignore[return-value]
    if "builtin" in dataset:  # python-docs: the reference topics that every Python carries for its help()
        from pydoc_data.topics import topics

        train = [topics[name] for name in sorted(topics)]
    else:
        train = [text for file in dataset["train_files"] for text in read_file(Path(file), column)]
    if "eval_files" in dataset:
        return train, [text for file in dataset["eval_files"] for text in read_file(Path(file), column)]
    fraction = dataset["eval_fraction"]  # held back at the end: of a single document's characters, or whole documents
    if len(train) == 1:
        cut = int(len(train[0]) * (1 - fraction))
        return [train[0][:cut]], [train[0][cut:]]
    cut = len(train) - max(1, round(len(train) * fraction))
    return train[:cut], train[cut:]


def read_file(path: Path, column: str) -> list[str]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            with path.open(encoding="utf-8") as lines:
                rows = [json.loads(line)[column] for line in lines if line.strip()]
        case ".csv":
            csv.field_size_limit(2**31 - 1)
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = [row[column] for row in csv.DictReader(file)]
        case ".parquet":
            from pyarrow.parquet import ParquetFile

            rows = ParquetFile(path).read(columns=[column]).column(0).to_pylist()
        case _:
            rows = [path.read_bytes().decode("utf-8")]
    return [text for text in rows if text]


def make_tokenizer(workload: dict[str, Any], train: list[str], evaluation: list[str]) -> tuple[Any, Callable]:
    """The tokenizer, and a document's ids by it. What has to be learnt is learnt from the training text alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    def byte_level(pairs: models.BPE, use_regex: bool) -> Tokenizer:
        made = Tokenizer(pairs)
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
        made.decoder = decoders.ByteLevel()
        return made

    chosen, model = workload.get("tokenizer", {}), workload["model"]
    if chosen.get("kind") == "char":
        ids = {character: index for index, character in enumerate(sorted(set().union(*train)))}
        unknown = {"unk_token": UNKNOWN} if set().union(*evaluation) - ids.keys() else {}
        chars = Tokenizer(models.WordLevel(ids | dict.fromkeys(unknown.values(), len(ids)), unk_token=UNKNOWN))
        chars.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        chars.decoder = decoders.Fuse()
        by_char = PreTrainedTokenizerFast(tokenizer_object=chars, **unknown)
        return by_char, lambda text: (ids.get(character, len(ids)) for character in text)
    if chosen.get("kind") == "byte":
        characters = {character: byte for byte, character in bytes_to_unicode().items()}
        by_byte = byte_level(models.BPE(characters, []), use_regex=False)
        return PreTrainedTokenizerFast(tokenizer_object=by_byte), str.encode
    if "train_bpe" in chosen:
        bpe, alphabet = byte_level(models.BPE(), use_regex=True), sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe.train_from_iterator(train, trainers.BpeTrainer(vocab_size=chosen["train_bpe"], show_progress=False,
                                special_tokens=[END_OF_TEXT], initial_alphabet=alphabet))  # fmt: skip
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)
    else:
        source = chosen if "name_or_path" in chosen else model
        tokenizer = AutoTokenizer.from_pretrained(
            source["name_or_path"], revision=source.get("revision"), trust_remote_code=model["trust_remote_code"]
        )
    return tokenizer, lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode(documents: list[str], to_ids: Callable, end_of_text: int | None) -> np.ndarray:
    """All documents' ids in one array, the end-of-text token between two of them where the tokenizer has one."""
    parts: list[np.ndarray] = []
    for document in documents:
        if parts and end_of_text is not None:
            parts.append(np.array([end_of_text], np.uint32))
        parts.append(np.fromiter(to_ids(document), np.uint32))
    return np.concatenate(parts)


@functools.lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, sequences: int, length: int) -> tuple[np.ndarray, int]:
    """Each epoch cuts the text anew from an offset and permutes the sequences."""
    random = np.random.default_rng((seed, epoch))
    return random.permutation(sequences), int(random.integers(length))


class MicroBatches(Dataset):
    """This rank's micro batches in the order of training: int64 [micro batch, sequence length] each.

    A seed's global batches are the same however they are divided into micro batches, accumulation steps and ranks.
    """

    def __init__(self, tokens: np.ndarray, length: int, arguments: dict[str, Any], global_batch: int) -> None:
        self.tokens, self.length, self.seed, self.global_batch = tokens, length, arguments["seed"], global_batch
        self.micro_batch = arguments["per_device_train_batch_size"]
        self.accumulation = arguments["gradient_accumulation_steps"]
        self.sequences = (len(tokens) - 1) // length  # the ragged tail is dropped
        self.steps_per_epoch = self.sequences // global_batch
        self.steps = max(1, round(arguments["num_train_epochs"] * self.steps_per_epoch))

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, accumulated = divmod(index, self.accumulation)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        order, offset = epoch_order(self.seed, epoch, self.sequences, self.length)
        start = step_of_epoch * self.global_batch + (accumulated * WORLD_SIZE + RANK) * self.micro_batch
        chosen = order[start : start + self.micro_batch, None]
        positions = (offset + chosen * self.length + np.arange(self.length + 1)) % len(self.tokens)
        window = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


class MicroBatchTrainer(Trainer):
    """The Trainer with batches that already are this rank's part."""

    output_layer: Any = None  # a fused one, if the configuration has it

    def get_train_dataloader(self) -> DataLoader:
        data: Any = self.train_dataset
        options: Any = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        if self.args.device.type == "cuda":
            from batches import BatchesAhead  # batches.py, beside this file

            return BatchesAhead(data, self.args.device, **options)
        return DataLoader(data, batch_size=None, **options)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # counting them takes time at every micro batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.output_layer is not None:  # needs them in the model's forward pass
            self.output_layer.targets = inputs["labels"]
        return super().compute_loss(model, inputs, *args, **kwargs)


class InstallsFastStep(TrainerCallback):
    """Ends the engine's steps as those of the trial: DeepSpeed's own way takes longer and rounds otherwise."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from steps import install_fast_step  # steps.py, beside this file

        install_fast_step(self._trainer.model_wrapped, WORLD_SIZE)


def token_nll(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """The negative log-likelihood in nats, computed in float32: "sum", or "none" for each target."""
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction=reduction, ignore_index=IGNORED)


def fuse_output_layer(model: Any, kind: str, compiled: bool) -> Any:
    """Replaces the model's output layer by one that in training returns the summed loss in place of the logits."""
    from output_layer import FusedOutputLayer  # output_layer.py, beside this file

    float8 = kind == "fused_fp8"
    if float8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        raise SystemExit(
            f"output_layer: {kind} needs a GPU of compute capability 8.9 (Ada, Hopper) or above, but this one is "
            "older; say fused in workload.yaml, which reaches another perplexity."
        )
    fused = FusedOutputLayer(model.get_output_embeddings(), float8=float8, compiled=compiled)
    model.set_output_embeddings(fused)
    return fused


def make_trainer(
    workload: dict[str, Any], given: dict[str, Any], tokenizer: Any, tokens: np.ndarray
) -> tuple[Trainer, Callable]:
    """The Trainer, and the loss to evaluate with. In the order that the model needs; draws weights and dropout from
    the seed as the trial did."""
    global_batch = json.loads(Path(given["deepspeed"]).read_text(encoding="utf-8"))["train_batch_size"]
    data = MicroBatches(tokens, workload["sequence_length"], given, global_batch)
    source = workload["model"]
    options = {"dtype": torch.float32, "trust_remote_code": source["trust_remote_code"]}
    if "attention_implementation" in workload:
        options["attn_implementation"] = workload["attention_implementation"]

    set_seed(given["seed"])
    model = None
    if "from_config" in source:  # before TrainingArguments: once they announce ZeRO-3, weights are drawn otherwise
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **source["from_config"]})
        model = AutoModelForCausalLM.from_config(config, **options)
    arguments = TrainingArguments(
        **given, output_dir=str(OUTPUT), max_steps=data.steps, report_to="none", save_strategy="no",
        logging_strategy="no", logging_nan_inf_filter=False, average_tokens_across_devices=False,
    )  # fmt: skip
    if compiled := arguments.torch_compile:  # layer by layer: sooner compiled than all at once, and faster
        os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    if model is None:  # after them, so that ZeRO-3 can partition while it loads
        if arguments.use_cpu and WORLD_SIZE > 1:  # else only torch knows of the other ranks here, and ZeRO-3 finds one
            from deepspeed.comm import init_distributed

            init_distributed("gloo", auto_mpi_discovery=False)
        name, revision = source["name_or_path"], source.get("revision")
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision, **options)
    fused = None
    if kind := workload.get("output_layer"):  # before adapters, which then leave it alone
        fused = fuse_output_layer(model, kind, compiled or torch.cuda.is_available())
    if rank := workload.get("lora_rank"):
        from peft import LoraConfig, get_peft_model

        set_seed(arguments.seed)
        if arguments.gradient_checkpointing:
            model.enable_input_require_grads()  # or no gradient reaches the adapters through a frozen embedding
        lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=workload["lora_alpha"], target_modules="all-linear")
        model = get_peft_model(model, lora)
    optimizer = None
    if "optim" not in given:  # the trial had DeepSpeed's AdamW, for optimizer states that leave the GPU
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        betas = (arguments.adam_beta1, arguments.adam_beta2)
        optimizer = DeepSpeedCPUAdam, {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}

    # A micro batch's summed loss ÷ the targets of a whole global batch; DeepSpeed then averages over ranks.
    scale = WORLD_SIZE / (data.global_batch * data.length)
    nll = torch.compile(token_nll) if compiled else token_nll

    def token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"]  # a fused output layer's are the sum already
        return (nll(logits, labels, "sum") if fused is None else logits) * scale

    trainer = MicroBatchTrainer(
        model=model, args=arguments, train_dataset=data, compute_loss_func=token_loss,
        optimizer_cls_and_kwargs=optimizer,
    )  # fmt: skip
    trainer.output_layer = fused
    trainer.add_callback(InstallsFastStep(trainer))
    return trainer, nll


@torch.no_grad()
def evaluate(engine: Any, tokens: np.ndarray, length: int, batch_size: int, nll: Callable) -> tuple[float, int]:
    """The negative log-likelihood in nats, summed over every token but the first on all ranks, and their number."""
    sequences = -(-(len(tokens) - 1) // length)  # the last one may be ragged
    batches = -(-sequences // (WORLD_SIZE * batch_size))  # the same number on all ranks, or ZeRO-3 would wait for ever
    indices = np.arange(batches * batch_size) * WORLD_SIZE + RANK
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    for own in indices.reshape(batches, batch_size):
        positions = own[:, None] * length + np.arange(length + 1)
        present = positions < len(tokens)
        window = np.where(present, tokens[np.where(present, positions, 0)].astype(np.int64), IGNORED)
        inputs = torch.from_numpy(window[:, :-1]).clamp(min=0).to(engine.device)
        targets = torch.from_numpy(window[:, 1:]).to(engine.device)
        each = nll(engine(input_ids=inputs).logits, targets, "none")
        totals += torch.stack([each.double().sum(), (targets != IGNORED).sum().double()])
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(totals)
    return float(totals[0]), int(totals[1])


def main() -> None:
    workload = read_workload()
    os.chdir(FOLDER)  # the paths in the YAML files lead from here
    given = yaml.safe_load(Path("training_args.yaml").read_bytes())
    train, evaluation = read_text(workload["dataset"])
    tokenizer, to_ids = make_tokenizer(workload, train, evaluation)
    tokens, eval_tokens = (encode(text, to_ids, tokenizer.eos_token_id) for text in (train, evaluation))
    recorded = workload["recorded"]
    for name, found in {"train_tokens": len(tokens), "eval_tokens": len(eval_tokens) - 1}.items():
        if recorded.get(name, found) != found:
            raise SystemExit(f"the data set has changed: {name} were {recorded[name]}, now they are {found}.")

    trainer, nll = make_trainer(workload, given, tokenizer, tokens)
    trainer.train()
    batch_size = workload["eval_batch_size_per_gpu"]
    nll_sum, count = evaluate(trainer.model_wrapped, eval_tokens, workload["sequence_length"], batch_size, nll)
    perplexity = math.exp(nll_sum / count)
    trainer.save_model()  # on every rank: ZeRO-3 gathers
    if RANK == 0:
        tokenizer.save_pretrained(OUTPUT)
        steps = trainer.state.global_step
        result = {"perplexity": perplexity, "nll_sum": nll_sum, "eval_tokens": count, "steps": steps}
        (OUTPUT / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        difference = perplexity / recorded["perplexity"] - 1
        print(
            f"perplexity {perplexity:.6g} with seed {given['seed']}; recorded with seed {recorded['seed']}: "
            f"{recorded['perplexity']:.6g} ({difference:+.2g} relative). Another seed gives another perplexity."
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. DeepSpeed holds on to groups, and so to Gloo's threads; one that still drops a tensor while the
    # interpreter is taken down aborts the process, and with it the others: github.com/pytorch/pytorch/issues/190489
    os._exit(0)
