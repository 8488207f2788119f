"""A training script as anybody may have one: digits, a small network, a plain loop.

Five of its lines are carbonopt's.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import carbonopt.script as carbon

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
digits = load_digits()
images, classes = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
(train_x, test_x), (train_y, test_y) = images.split([1500, 297]), classes.split([1500, 297])
model = torch.nn.Sequential(
    torch.nn.Linear(64, args.hidden), torch.nn.ReLU(), torch.nn.Linear(args.hidden, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
steps_per_epoch = len(train_x) // args.batch

run = carbon.run(total_steps=args.epochs * steps_per_epoch)
for epoch in range(args.epochs):
    for rows in torch.randperm(len(train_x))[: steps_per_epoch * args.batch].split(args.batch):
        loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()
    with run.evaluation(), torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}")
    if run.report(accuracy=accuracy, count=len(test_x)):
        break
