"""Train the model of ``train_images.py`` or ``train_chargpt.py`` by PyTorch, on the same data for the same updates.

    python scripts/train_images.py --export images.npz
    python scripts/peers/torch_train.py images.npz --seed 0

Model, data, optimizer, schedule, clipping and precision are those that the export names; initial values come from the
same distributions, and they and the order of samples from PyTorch's own random numbers. Prints one JSON object. Needs
PyTorch, and nothing of mpdp.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "mpdp" / "bench" / "peers"))

from torch_models import GPT  # what mpdp bench train compares with

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class BasicBlock(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


def resnet18():
    """Return torchvision's ResNet-18 for one channel and 10 classes, with its initial values."""
    layers = [nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage in range(4):
        width = 64 << stage
        layers += [BasicBlock(inputs, width, 2 if stage else 1), BasicBlock(width, width, 1)]
        inputs = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def build(settings):
    """Return the model that the settings name."""
    if settings["model"] == "gpt":
        return GPT(*(settings[name] for name in ("layers", "width", "heads", "context", "vocabulary")))
    if settings["model"] == "mlp":
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, 10))
    if settings["model"] == "resnet18":
        return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), resnet18())
    layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *layers)


def tensors(export, device):
    """Return (x, y) to train on and (x, y) to test on, a row a sample."""
    parts = []
    for part in ("", "test_"):
        if part + "x" in export:
            x, y = torch.from_numpy(export[part + "x"]), torch.from_numpy(export[part + "y"])
        else:  # windows of the text: predict each symbol from those before it
            symbols = torch.from_numpy(export[part + "symbols"]).long()
            context = json.loads(str(export["settings"]))["context"]
            count = (len(symbols) - 1) // context
            x, y = (symbols[shift:][: count * context].view(count, context) for shift in (0, 1))
        parts.append((x.to(device), y.to(device)))
    return parts


def factor(step, settings):
    """Return the factor on the learning rate: a linear rise, then half a cosine."""
    warmup, total, final = settings["warmup"], settings["updates"], settings["final"]
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def train(model, x, y, settings, device):
    """Do all updates."""
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if decays(name, settings)],
            "weight_decay": settings["weight_decay"],
        },
        {
            "params": [p for name, p in model.named_parameters() if not decays(name, settings)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=settings["lr"])
    dtype = HALVES.get(settings["precision"])
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    batch = settings["global_batch_size"]
    order, at = torch.randperm(len(x)), 0
    for step in range(settings["updates"]):
        if at >= len(x):  # the last batch of an epoch may be short
            order, at = torch.randperm(len(x)), 0
        chosen = order[at : at + batch].to(device)
        at += batch
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * factor(step, settings)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x[chosen]), y[chosen].flatten())
        scaler.scale(loss).backward()
        if "clip_norm" in settings:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        scaler.step(optimizer)
        scaler.update()


def decays(name, settings):
    """Say whether a parameter decays: all, but for biases of the GPT."""
    return settings["model"] != "gpt" or not name.endswith("bias")


@torch.no_grad()
def evaluate(model, x, y, settings, device):
    """Return (accuracy, mean loss) over all targets."""
    dtype = HALVES.get(settings["precision"])
    model.eval()
    right, loss = 0, 0.0
    for first in range(0, len(x), 128):
        target = y[first : first + 128].flatten()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            output = model(x[first : first + 128]).to(torch.get_default_dtype())
        right += int((output.argmax(-1) == target).sum())
        loss += float(F.cross_entropy(output, target, reduction="sum"))
    return right / y.numel(), loss / y.numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path, help="what --export has written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    export = np.load(arguments.export)
    settings = json.loads(str(export["settings"]))
    if settings["precision"] == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = settings["precision"] == "tf32"
    torch.manual_seed(arguments.seed)
    torch.set_default_dtype(torch.float64 if settings["precision"] == "float64" else torch.float32)
    model = build(settings).to(device)
    (x, y), (test_x, test_y) = tensors(export, device)
    if x.is_floating_point():
        x, test_x = x.to(torch.get_default_dtype()), test_x.to(torch.get_default_dtype())
    train(model, x, y, settings, device)
    accuracy, loss = evaluate(model, test_x, test_y, settings, device)
    row = {"torch": torch.__version__, "seed": arguments.seed, "updates": settings["updates"]}
    row |= (
        {"bits": loss / math.log(2)} if settings["model"] == "gpt" else {"accuracy": accuracy, "loss": loss}
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
