"""Records a replay table on one GPU: every configuration of a grid is really trained, by a captured
CUDA graph.

    python benchmarks/search/record_table.py TABLE.jsonl --task text --files train.txt eval.txt
    python benchmarks/search/record_table.py TABLE.jsonl --task tune --files advising.json text.txt

`text`: a small GPT from scratch on little text (BPE tokens), so many epochs that it overfits.
`tune`: the same GPT is trained on the text first, then tuned on text-to-SQL pairs, under two
schedules of the learning rate. Joules are those of the GPU's own counter over the steps of a run of
its batch size, at least two seconds long.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import nn

BLOCK = 128  # tokens
WIDTH, HEADS, VOCABULARY = 256, 4, 2048
EVALUATIONS = 8
GRIDS = {
    "text": {
        "global_batch_size": [16, 32, 64, 128, 256],
        "learning_rate": [1e-4, 3e-4, 6e-4, 1e-3, 2e-3, 4e-3],
        "epochs": [1, 2, 4, 8, 16],
    },
    "tune": {
        "global_batch_size": [8, 16, 32, 64, 128],
        "learning_rate": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3],
        "epochs": [1, 2, 4, 8],
        "lr_scheduler": ["linear", "constant_with_warmup"],
    },
}
MEASURE_S = 2.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, WIDTH)
        )
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.token.weight.T


class Trainer:
    """The model, its optimizer and one training step for each batch size, captured once."""

    def __init__(self, device: torch.device, layers: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Gpt(layers).to(device)
        self.lr = torch.tensor(0.0, device=device)
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.lr,
            betas=(0.9, 0.98),
            capturable=device.type == "cuda",
            fused=device.type == "cuda",
        )
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self._graphs: dict[int, tuple] = {}

    def reset(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.initial, strict=True):
                parameter.copy_(value)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()

    def _step(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        kept = mask[:, 1:].flatten()
        ((loss * kept).sum() / kept.sum().clamp(min=1)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def step(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        if self.device.type != "cuda":
            self._step(tokens, mask)
            return
        size = len(tokens)
        if size not in self._graphs:
            raise KeyError(f"batch {size} has not been captured")
        graph, held_tokens, held_mask = self._graphs[size]
        held_tokens.copy_(tokens)
        held_mask.copy_(mask)
        graph.replay()

    def capture(self, size: int) -> None:
        if self.device.type != "cuda":
            return
        tokens = torch.zeros(size, BLOCK + 1, dtype=torch.long, device=self.device)
        mask = torch.ones(size, BLOCK + 1, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(tokens, mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(tokens, mask)
        self._graphs[size] = (graph, tokens, mask)

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor, mask: torch.Tensor) -> float:
        self.model.eval()
        total, count = 0.0, 0.0
        for part, kept in zip(tokens.split(256), mask.split(256), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
                logits = self.model(part[:, :-1])
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="none"
            )
            total += float((loss * kept[:, 1:].flatten()).sum())
            count += float(kept[:, 1:].sum())
        self.model.train()
        return total / count


def rate(schedule: str, step: int, total: int) -> float:
    """The share of the learning rate at a step, with a tenth of warm-up, as
    transformers.SchedulerType has it.
    """
    warm = max(1, total // 10)
    if step < warm:
        return (step + 1) / warm
    return (
        1.0
        if schedule == "constant_with_warmup"
        else max(0.0, (total - step) / max(1, total - warm))
    )


def train(trainer: Trainer, data: tuple, held_back: tuple, params: dict, seed: int) -> dict:
    tokens, mask = data
    batch = params["global_batch_size"]
    steps_per_epoch = len(tokens) // batch
    total = math.ceil(steps_per_epoch * params["epochs"])
    evaluate_at = [max(1, round(total * part / EVALUATIONS)) for part in range(1, EVALUATIONS + 1)]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    trainer.reset()
    evals, order = [], torch.empty(0, dtype=torch.long)
    for step in range(total):
        place = step % steps_per_epoch
        if place == 0:
            order = torch.randperm(len(tokens), generator=generator).to(tokens.device)
        chosen = order[place * batch : (place + 1) * batch]
        trainer.lr.fill_(
            params["learning_rate"] * rate(params.get("lr_scheduler", "linear"), step, total)
        )
        trainer.step(tokens[chosen], mask[chosen])
        if step + 1 in evaluate_at and (not evals or evals[-1]["step"] < step + 1):
            nll = round(trainer.evaluate(*held_back), 5)
            evals.append(
                {"step": step + 1, "nll": math.inf if math.isnan(nll) else nll}
            )  # diverged: no better
    return {"params": params, "seed": seed, "total_steps": total, "evals": evals}


def cost(trainer: Trainer, data: tuple, held_back: tuple, batch: int) -> dict:
    """Joules and seconds of a step and of an evaluation, by the GPU's counter."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")

    def window(action) -> tuple[float, float]:
        action()
        torch.cuda.synchronize()
        before, began, done = (
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
            time.perf_counter(),
            0,
        )
        while time.perf_counter() - began < MEASURE_S:
            for _ in range(20):
                action()
            torch.cuda.synchronize()
            done += 20
        joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1000
        return joules / done, (time.perf_counter() - began) / done

    chosen = torch.arange(batch, device=trainer.device)
    step_j, step_s = window(lambda: trainer.step(data[0][chosen], data[1][chosen]))
    eval_j, _ = window(lambda: trainer.evaluate(*held_back))
    return {
        "joules_per_step": round(step_j, 4),
        "seconds_per_step": round(step_s, 6),
        "joules_per_eval": round(eval_j, 3),
    }


def packed(
    tokenizer: ByteLevelBPETokenizer, text: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokenizer.encode(text).ids
    rows = (len(ids) - 1) // BLOCK
    tokens = torch.tensor(
        [ids[row * BLOCK : row * BLOCK + BLOCK + 1] for row in range(rows)], device=device
    )
    return tokens, torch.ones_like(tokens, dtype=torch.float)


def pairs(
    tokenizer: ByteLevelBPETokenizer, file: Path, device: torch.device
) -> tuple[tuple, tuple]:
    """Question → SQL, a row each; only the SQL counts. Every tenth group of questions is held back."""
    rows: tuple[list, list] = ([], [])
    for number, group in enumerate(json.loads(file.read_text())):
        for sentence in group["sentences"]:
            sql, question = group["sql"][0], sentence["text"]
            for name, value in sentence["variables"].items():
                sql, question = sql.replace(name, value), question.replace(name, value)
            asked, answer = (
                tokenizer.encode(question + "\n").ids,
                tokenizer.encode(sql + "\n\n").ids,
            )
            ids = (asked + answer)[: BLOCK + 1]
            kept = ([0.0] * len(asked) + [1.0] * len(answer))[: BLOCK + 1]
            pad = BLOCK + 1 - len(ids)
            rows[number % 10 == 9].append((ids + [0] * pad, kept + [0.0] * pad))

    def stacked(part: list) -> tuple[torch.Tensor, torch.Tensor]:
        ids, kept = zip(*part, strict=True)
        return torch.tensor(ids, device=device), torch.tensor(kept, device=device)

    return stacked(rows[0]), stacked(rows[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--task", choices=list(GRIDS), required=True)
    parser.add_argument("--files", type=Path, nargs=2, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=int, default=None, help="configurations: a rehearsal")
    options = parser.parse_args()
    if options.layers < 1 or (options.limit is not None and options.limit < 1):
        parser.error("--layers and --limit must be at least 1")
    if missing := [str(file) for file in options.files if not file.is_file()]:
        parser.error(f"--files must be files, but {missing[0]} is none")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first, second = options.files
    corpus = first if options.task == "text" else second
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(corpus)], vocab_size=VOCABULARY, show_progress=False)
    trainer = Trainer(device, options.layers)
    text = packed(tokenizer, corpus.read_text(), device)
    grid = GRIDS[options.task]
    for size in grid["global_batch_size"]:
        trainer.capture(size)
    if options.task == "text":
        data, held_back = text, packed(tokenizer, second.read_text(), device)
    else:
        data, held_back = pairs(tokenizer, first, device)
        params = {"global_batch_size": 64, "learning_rate": 1e-3, "epochs": 4}
        if options.limit is None:
            print("first trained:", train(trainer, text, text, params, 0)["evals"][-1], flush=True)
        trainer.initial = [p.detach().clone() for p in trainer.model.parameters()]
    least = max(grid["global_batch_size"])
    if len(data[0]) < least or not len(held_back[0]):
        parser.error(
            f"--files must hold {least} training sequences and 1 for evaluation, of {BLOCK} tokens"
        )
    print(f"{len(data[0])} training and {len(held_back[0])} evaluation sequences", flush=True)
    costs = {
        size: cost(trainer, data, held_back, size)
        for size in grid["global_batch_size"]
        if device.type == "cuda"
    }
    print(json.dumps(costs), flush=True)
    with options.table.open("w") as out:
        for values in itertools.islice(itertools.product(*grid.values()), options.limit):
            params = dict(zip(grid, values, strict=True))
            began = time.perf_counter()
            run = train(trainer, data, held_back, params, 0)
            run.update(costs.get(params["global_batch_size"], {}))
            out.write(json.dumps(run) + "\n")
            out.flush()
            if params["epochs"] == grid["epochs"][-1]:
                print(
                    json.dumps(params),
                    run["evals"][-1],
                    f"{time.perf_counter() - began:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
