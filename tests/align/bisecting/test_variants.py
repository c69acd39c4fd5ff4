"""A second target without declared choices: which of its modules is guilty? Public reports, rebuilt small."""

import pytest

NORM = """
class RMS(nn.Module):
    def __init__(self, widens):
        super().__init__()
        self.widens = widens
    def forward(self, x):
        h = x.float() if self.widens else x
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

def net(widens):
    torch.manual_seed(0)
    x = torch.randn(6, 64)
    x[2] *= 900
    return nn.Sequential(nn.Linear(64, 64), RMS(widens), nn.Linear(64, 8)).eval(), x

def build():
    return net(True)

def build_fused():
    return net(False)
"""

UNIFORM_ATTENTION = """
class Attention(nn.Module):
    def __init__(self, averages):
        super().__init__()
        self.averages = averages
    def forward(self, q, k, v):
        return v.mean(-2, keepdim=True).expand_as(v) if self.averages else F.scaled_dot_product_attention(q, k, v)

class Block(nn.Module):
    def __init__(self, averages):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.attn, self.out = Attention(averages), nn.Linear(32, 32)
    def forward(self, x):
        return x + self.out(self.attn(*self.qkv(self.norm(x)).chunk(3, -1)))

def net(wrong):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(i == wrong) for i in range(4)]).eval(), torch.randn(1, 24, 32) * 3

def build():
    return net(None)

def build_fused():
    return net(2)
"""

OTHER_GELU = """
def net(kinds):
    torch.manual_seed(0)
    layers = [layer for kind in kinds for layer in (nn.Linear(64, 64), nn.GELU(approximate=kind))]
    return nn.Sequential(*layers).eval(), torch.randn(256, 64) * 6

def build():
    return net(["none", "none", "none"])

def build_fused():
    return net(["none", "tanh", "none"])
"""

NARROW_TABLE = """
class Table(nn.Module):
    def __init__(self, widens):
        super().__init__()
        self.widens = widens
    def forward(self, count):
        dtype = torch.float32 if self.widens else torch.bfloat16
        rates = 1e4 ** (-torch.arange(0, 64, 2).float() / 64)
        angles = torch.outer(torch.arange(count).to(dtype), rates.to(dtype))
        return angles.cos().bfloat16(), angles.sin().bfloat16()

class Net(nn.Module):
    def __init__(self, widens):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.table = nn.Linear(64, 64), Table(widens)
    def forward(self, x):
        c, s = self.table(x.shape[-2])
        a, b = self.q(x).chunk(2, -1)
        return torch.cat((a * c - b * s, a * s + b * c), -1)

def build():
    return Net(True).eval(), torch.randn(1, 2048, 64)

def build_fused():
    return Net(False).eval(), torch.randn(1, 2048, 64)
"""

NARROW_SUM = """
class Cumulative(nn.Module):
    def __init__(self, widens):
        super().__init__()
        self.widens = widens
    def forward(self, x):
        if self.widens:
            return x.float().cumsum(-1).to(x.dtype)
        total, found = torch.zeros_like(x[..., 0]), []
        for i in range(x.shape[-1]):
            total = total + x[..., i]
            found.append(total)
        return torch.stack(found, -1)

def build():
    return nn.Sequential(nn.ReLU(), Cumulative(True)).eval(), torch.rand(2, 1024)

def build_fused():
    return nn.Sequential(nn.ReLU(), Cumulative(False)).eval(), torch.rand(2, 1024)
"""

LATE_SCALE = """
class Scores(nn.Module):
    def __init__(self, scales_first):
        super().__init__()
        self.scales_first = scales_first
    def forward(self, q, k):
        scale = q.shape[-1] ** -0.5
        return (q * scale) @ k.transpose(-1, -2) if self.scales_first else (q @ k.transpose(-1, -2)) * scale

class Attention(nn.Module):
    def __init__(self, scales_first):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scores, self.soft = Scores(scales_first), nn.Softmax(-1)
    def forward(self, x):
        return self.soft(self.scores(self.q(x), self.k(x))) @ x

def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 12, 64) * 150

def build():
    return Attention(True).eval(), inputs()

def build_fused():
    return Attention(False).eval(), inputs()
"""


@pytest.mark.parametrize(
    ("text", "dtype", "path"),
    [
        (NORM, "float16", "1"),
        (UNIFORM_ATTENTION, "float16", "2.attn"),
        (OTHER_GELU, "float32", "3"),
        (NARROW_TABLE, "bfloat16", "table"),
        (NARROW_SUM, "bfloat16", "1"),
        (LATE_SCALE, "float16", "scores"),
    ],
    ids=[
        "rms norm squared in half",
        "uniform attention",
        "tanh gelu",
        "rope table in bfloat16",
        "running sum in bfloat16",
        "scale after the scores",
    ],
)
def test_the_module_that_differs_for_the_worse_is_named(
    target, bisect, named, text: str, dtype: str, path: str
) -> None:
    build = target(text)
    done = bisect(build, candidate=build.replace(":build", ":build_fused"), dtype=dtype)
    assert named(done) == {frozenset({f"user:module@{path}"})}
    first = done.result.cards[0].evidence.partition("first bad node ")[2]
    assert first.startswith(f"{path}/")


BIAS_ONCE = """
class Split(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear
    def forward(self, x):
        return x @ self.linear.weight.T + self.linear.bias

class Net(nn.Module):
    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.up, linear = nn.Linear(64, 512, bias=False), nn.Linear(512, 512)
        linear.bias.data.mul_(40)
        self.proj = linear if fused else Split(linear)
    def forward(self, x):
        return F.relu(self.proj(self.up(x)))

def build():
    return Net(False).eval(), torch.randn(64, 64)

def build_fused():
    return Net(True).eval(), torch.randn(64, 64)
"""

FUSED_ATTENTION = """
class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
    def forward(self, q, k, v):
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v

class Net(nn.Module):
    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attn, self.out = nn.Linear(64, 192), Attention(fused), nn.Linear(64, 64)
    def forward(self, x):
        return self.out(self.attn(*self.qkv(x).chunk(3, -1)))

def build():
    return Net(False).eval(), torch.randn(2, 4, 128, 64) * 4

def build_fused():
    return Net(True).eval(), torch.randn(2, 4, 128, 64) * 4
"""


@pytest.mark.parametrize(
    "text", [BIAS_ONCE, FUSED_ATTENTION], ids=["bias before the rounding", "scores kept in float32"]
)
def test_a_module_that_is_nearer_to_the_truth_is_not_blamed(target, bisect, text: str) -> None:
    build = target(text)
    done = bisect(build, candidate=build.replace(":build", ":build_fused"), dtype="bfloat16")
    assert done.result.status.value == "no culprit"


FOLDED = """
def parts():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
    norm.running_mean.normal_(0, 3)
    norm.running_var.uniform_(1e-3, 2)
    norm.weight.data.uniform_(0.5, 2)
    norm.bias.data.normal_()
    return conv, norm

class Folded(nn.Module):
    def __init__(self, conv, norm, dtype):
        super().__init__()
        parts = (conv.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        w, m, v, g, h = (part.data.to(dtype) for part in parts)
        s = g * torch.rsqrt(v + norm.eps)
        self.weight, self.bias = nn.Parameter(w * s[:, None, None, None]), nn.Parameter(h - m * s)
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, padding=1)

class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        conv, norm = parts()
        self.body = nn.Sequential(conv, norm) if dtype is None else Folded(conv, norm, dtype)
    def forward(self, x):
        return F.silu(self.body(x))

def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 16, 16, 16)

def build():
    return Net(None).eval(), inputs()

def build_fused():
    return Net(torch.bfloat16).eval(), inputs()
"""


def test_a_norm_folded_in_bfloat16_is_named_by_a_metric_of_the_users(target, bisect, named) -> None:
    """Its error is 2.5 times the baseline's, yet that of a single rounding: the policies let it pass."""
    build = target(
        FOLDED
        + """
def mean_error(candidate, reference):
    return (candidate.double() - reference.double()).abs().mean()
"""
    )
    metric = build.replace(":build", ":mean_error")
    done = bisect(build, candidate=build.replace(":build", ":build_fused"), dtype="bfloat16", metric=metric)
    assert named(done) == {frozenset({"user:module@body"})}


HALF_STATISTICS = """
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    model[0].weight.data.mul_(300)
    model[1].running_var.fill_(1e5)
    model[1].bias.data.normal_()
    return model.eval()

def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 3, 8, 8).half()

def build():
    model = net().half()
    model[1] = net()[1]
    return model, inputs()

def build_fused():
    return net().half(), inputs()
"""


def test_statistics_that_overflow_in_half_are_named_though_no_activation_is_infinite(target, bisect, named) -> None:
    build = target(HALF_STATISTICS)
    done = bisect(build, candidate=build.replace(":build", ":build_fused"), dtype="as-built")
    assert named(done) == {frozenset({"user:module@1"})}


DROPOUT = """
def net():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 10, 64)

def build():
    return net().eval(), inputs()

def build_fused():
    return net().train(), inputs()
"""


def test_dropout_left_on_is_told_as_that_and_never_as_precision(target, bisect, named) -> None:
    build = target(DROPOUT)
    done = bisect(build, candidate=build.replace(":build", ":build_fused"))
    assert named(done) == {frozenset({"user:training_mode"})}
    assert any("dropout" in note and "not precision" in note for note in done.result.notes)


STALE = """
POOL = torch.zeros(4, 32)  # stands for memory that a device hands out again

class Norm(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
    def forward(self, x):
        s = x + (POOL.to(x.dtype) if self.fused else 0)
        POOL[0] += 1
        return s * torch.rsqrt(s.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)

def net(fused):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Norm(False), nn.Linear(32, 32), Norm(fused)).eval()

def build():
    return net(False), torch.ones(4, 32)

def build_fused():
    return net(True), torch.ones(4, 32)
"""


def test_a_result_that_depends_on_what_ran_before_is_told_to_be_not_deterministic(target, bisect, named) -> None:
    build = target(STALE)
    done = bisect(build, candidate=build.replace(":build", ":build_fused"))
    assert named(done) == {frozenset({"user:module@3"})}
    assert any(
        note.startswith("not deterministic: equal runs gave different bits with 1 of 1") for note in done.result.notes
    )


def test_equal_variants_leave_nothing_to_search(target, bisect) -> None:
    from align.dumpers.errors import UsageError

    build = target(OTHER_GELU)
    with pytest.raises(UsageError, match="do not differ"):
        bisect(build, candidate=build)
