"""`importing.left_out` and `uncompiled`: libraries are imported without what they do not use here."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from titan_rl.importing import left_out


def test_a_module_that_is_left_out_is_not_imported_and_can_be_imported_later() -> None:
    sys.modules.pop("this", None)
    with left_out({"this": {"poem": "none"}}):
        from this import poem  # type: ignore[attr-defined]
    assert poem == "none" and "this" not in sys.modules


def test_a_module_that_was_imported_before_is_left_as_it_is() -> None:
    import json

    with left_out({"json": {}}):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def run(program: str) -> str:
    """What a process of its own prints: torch's compiler is loaded once in a process."""
    program = textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BEGIN = """
import sys, torch
from titan_rl.importing import Named, uncompiled

def is_loaded():
    return "torch._dynamo.eval_frame" in sys.modules

with uncompiled({"torch._inductor": {}, "torch._functorch.partitioners": {"get_default_op_list": Named}}):
    @torch.compile(dynamic=True)
    def double(x):
        return 2 * x
    from torch.distributed.pipelining import schedules
    from torch._functorch.partitioners import get_default_op_list

x = torch.ones(2)
assert not is_loaded() and double(x).tolist() == [2.0, 2.0] and double.__name__ == "double"
"""


@pytest.mark.parametrize(
    "use",
    [
        "assert torch.compile(lambda x: x + 1, backend='eager')(x).tolist() == [2.0, 2.0]",
        "from torch._dynamo import OptimizedModule; assert OptimizedModule is not Named",
        "import torch._dynamo.utils as u; assert u is sys.modules['torch._dynamo.utils'] is torch._dynamo.utils",
        "from torch._dynamo.testing import CompileCounter; CompileCounter()",
        "from torch._functorch.partitioners import get_default_op_list as ops; ops().view_ops; torch._dynamo.reset()",
        "assert callable(torch._dynamo.decorators.mark_static) and torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST",
        "torch.compiler.disable(double)(x)",
        "import torch._dynamo.config as c; before = c; torch._dynamo.reset(); assert torch._dynamo.config is before",
        "from threading import Thread; use = lambda: torch._dynamo.reset(); Thread(target=use).start(); use()",
    ],
)
def test_the_compiler_is_there_when_somebody_uses_it(use: str) -> None:
    assert run(f"{BEGIN}\n{use}\nassert is_loaded()\nprint(double(x).sum().item())") == "4.0"


def test_what_was_said_before_the_compiler_was_loaded_holds() -> None:
    printed = run(
        f"""{BEGIN}
inside = []
@torch.compiler.disable
def apart(y):
    inside.append(torch.compiler.is_compiling())
    return y
torch.compile(lambda y: apart(y + 1), backend="eager")(x)
print(inside)
with uncompiled({{}}):
    pass"""
    )
    assert printed == "[False]"
    printed = run(
        """
import torch
from titan_rl.importing import uncompiled
with uncompiled({"torch._inductor": {}, "torch._inductor.config": {}}):
    torch.use_deterministic_algorithms(True)
torch._dynamo.reset()
import torch._inductor.config
print(torch._inductor.config.deterministic)"""
    )
    assert printed == "True"


def test_eager_code_does_not_load_the_compiler() -> None:
    printed = run(
        f"""{BEGIN}
import importlib.metadata, inspect, importlib
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
torch.utils.checkpoint.checkpoint(lambda w: (w * w).sum(), weight, use_reentrant=True).backward()
optimizer.step(), optimizer.zero_grad(), optimizer.state_dict()
inspect.getmodule(run_all := lambda: None), list(importlib.metadata.distributions())[:1], importlib.invalidate_caches()
print(is_loaded())"""
    )
    assert printed == "False"


def test_a_module_that_is_needed_to_load_the_compiler_inside_the_block_is_imported() -> None:
    printed = run(
        """
import sys, torch
from titan_rl.importing import uncompiled
with uncompiled({"torch._inductor": {}, "torch._inductor.config": {}}):
    import torch._dynamo.utils
    import torch._inductor.config
print(hasattr(torch._inductor.config, "freezing"), sys.modules["torch._inductor"].__file__ is not None)
"""
    )
    assert printed == "True True"
