"""The workloads of ``mpdp bench train`` in PyTorch. Names of parameters are those that ``losses.py`` knows."""

import torch
import torch.nn.functional as F
from torch import nn

GPT_SIZES = {"chargpt": (6, 384, 6, 256, 128), "gpt2": (12, 768, 12, 1024, 50304)}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, 2)
        q, k, v = (part.view(n, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Pre-norm, tied head, no dropout; weights from normal(0, 0.02), biases 0."""

    def __init__(self, layers, width, heads, context, vocabulary):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tok.weight).flatten(0, 1)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    """torchvision's layout, names and initial values (version 1, stride in the 3 x 3)."""

    def __init__(self, classes=1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for i in range(depth):
                stride = 2 if stage and i == 0 else 1
                blocks.append(Bottleneck(inputs, 64 << stage, stride))
                inputs = 256 << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def build(workload, batch, rank):
    """Return (model, x, y) on the CPU; each rank has data of its own, all the same weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    if workload in GPT_SIZES:
        sizes = GPT_SIZES[workload]
        context, vocabulary = sizes[3], sizes[4]
        x = torch.randint(0, vocabulary, (batch, context), generator=generator)
        return GPT(*sizes), x, torch.randint(0, vocabulary, (batch * context,), generator=generator)
    shape: tuple[int, ...]
    if workload == "mlp":
        model = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        shape, classes = (784,), 10
    elif workload == "convnet":
        layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)]
        model, shape, classes = nn.Sequential(*layers), (1, 28, 28), 10
    else:
        model, shape, classes = ResNet50().to(memory_format=torch.channels_last), (3, 224, 224), 1000
    x = torch.randn(batch, *shape, generator=generator)
    if workload == "resnet50":
        x = x.to(memory_format=torch.channels_last)
    return model, x, torch.randint(0, classes, (batch,), generator=generator)


def optimizer_of(workload, parameters, device):
    """Return SGD or AdamW in its fastest form on the device."""
    gpu = device != "cpu"
    if workload in GPT_SIZES:
        return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=gpu, capturable=gpu)
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=gpu)
