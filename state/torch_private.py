"""The one module that touches private torch: each name is wrapped in a word of ours, and missing ones say so.

Everything is found by feature, not by version, and imported when first used: Inductor alone takes seconds to import.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "compile_cache_folder",
    "compile_cache_in",
    "compile_graph",
    "fake_mode",
    "fake_of",
    "gives_number",
    "has_hooks",
    "is_compiled",
    "is_elementwise",
    "is_fake",
    "is_operation",
    "is_profiling",
    "is_tracing",
    "keeps_elements",
    "memory_events",
    "module_tables",
    "nested_trace",
    "once_operation",
    "reads_a_value",
    "scan",
    "schema",
    "storage_of",
    "switch_onednn",
    "trace",
    "untraced",
]

_here = threading.local()


class DispatchMode(TorchDispatchMode):
    """Torch's dispatch mode, entered without a trace in the environment."""

    def __enter__(self) -> Any:
        _import_dynamo()
        return super().__enter__()  # type: ignore[no-untyped-call] # torch's class is not annotated


def _find(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this torch ({torch.__version__}) has no {module}.{name}, which purestep needs; "
            "run the step eagerly (without ps.jit) or install another torch"
        ) from error


def is_tracing() -> bool:
    """Whether a graph is being recorded in this thread by :func:`trace`."""
    return not torch.compiler.is_dynamo_compiling() and getattr(_here, "tracing", False)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    return isinstance(tensor, _find("torch._subclasses.fake_tensor", "FakeTensor"))


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Run operations without recording them."""
    with _find("torch.fx.experimental.proxy_tensor", "disable_proxy_modes_tracing")():
        yield


def fake_mode() -> Any:
    """A mode in which tensors have shapes but no values; real tensors that a step closes over may enter."""
    shapes = _find("torch.fx.experimental.symbolic_shapes", "ShapeEnv")()
    return _find("torch._subclasses.fake_tensor", "FakeTensorMode")(
        shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True
    )


def fake_of(mode: Any, tensor: Tensor) -> Tensor:
    """The fake twin of a tensor: same shape, strides, dtype, device."""
    return mode.from_tensor(tensor, static_shapes=True)  # type: ignore[no-any-return]


def trace(fn: Callable[..., Any], mode: Any, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Record ``fn`` over flat fake tensors into a graph of aten operations."""
    make_fx = _find("torch.fx.experimental.proxy_tensor", "make_fx")
    _here.tracing = True
    try:
        with mode, torch.no_grad():
            return make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)  # type: ignore[no-any-return]
    finally:
        _here.tracing = False


def nested_trace(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Record ``fn`` into a graph of its own while another one is being recorded."""
    make_fx = _find("torch.fx.experimental.proxy_tensor", "make_fx")
    with untraced(), torch.no_grad():
        examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        return make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*examples)  # type: ignore[no-any-return]


def scan(
    body: torch.fx.GraphModule, carry: Sequence[Tensor], rows: Sequence[Tensor], fixed: Sequence[Tensor]
) -> list[Tensor]:
    """Fold ``body(*carry, *row, *fixed) -> carry`` over the first dimension of ``rows``, as one loop in the graph."""
    out = _find("torch._higher_order_ops.scan", "scan_op")(body, list(carry), list(rows), tuple(fixed))
    return list(out[: len(carry)])


_COMPILER: dict[str, Any] = {
    "cpp_wrapper": True,  # the calls of the kernels in C++ too: no Python between them
    "size_asserts": False,  # the form of every input is checked before a call, by its key
    "layout_optimization": False,  # pictures stay as they come: moving them to channels_last and back costs time and memory
    "cpp.min_chunk_size": 2048,  # below so many elements a second thread costs more than it gives
}
_LARGE = 3000  # nodes; the calls of so many kernels take a C++ compiler long to optimise, and gain nothing by it


def compile_graph(
    graph: torch.fx.GraphModule, mode: Any, inputs: Sequence[Tensor], rewrite: Callable[[torch.fx.Graph], None]
) -> Callable[..., Sequence[Tensor]]:
    """Lower a recorded graph with Inductor.

    Args:
        graph: the graph.
        mode: the fake mode it was recorded in.
        inputs: the fake tensors it was recorded with.
        rewrite: changes the graph, after its writes were made functional.
    """
    compile_fx = _find("torch._inductor.compile_fx", "compile_fx")
    with mode, torch.no_grad(), _kept_environment():
        settings = _compiler_settings(rewrite, large=len(graph.graph.nodes) > _LARGE)
        return compile_fx(graph, list(inputs), config_patches=settings)  # type: ignore[no-any-return]


def _compiler_settings(rewrite: Callable[[torch.fx.Graph], None], *, large: bool) -> dict[str, Any]:
    """What we ask of Inductor, where it knows it."""
    known = import_module("torch._inductor.config").get_config_copy()
    wanted = {**_COMPILER, "cpp_wrapper_build_separate": large, "post_grad_custom_post_pass": _graph_pass(rewrite)}
    return {name: value for name, value in wanted.items() if name in known}


def _graph_pass(rewrite: Callable[[torch.fx.Graph], None]) -> Any:
    """A pass in the form that Inductor's cache on disk can tell from another one."""
    base = _find("torch._inductor.custom_graph_pass", "CustomGraphPass")
    files = tuple(sorted(str(path) for path in Path(inspect.getfile(rewrite)).parent.glob("*.py")))
    identity = _find("torch._inductor.custom_graph_pass", "get_hash_for_files")(files)

    class Pass(base):  # type: ignore[misc,valid-type]
        def __call__(self, graph: torch.fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return identity

    return Pass()


def once_operation() -> Any:
    """The operation whose result Inductor stores instead of computing it wherever it is read; ``None`` if there is none."""
    with contextlib.suppress(ImportError):
        import_module("torch._inductor.test_operators")
    packet = getattr(torch.ops._inductor_test, "realize", None)
    return None if packet is None else packet.default


def compile_cache_folder() -> Path:
    """Where Inductor keeps what it compiled."""
    return Path(_find("torch._inductor.runtime.cache_dir_utils", "cache_dir")())


@contextlib.contextmanager
def compile_cache_in(folder: Path) -> Iterator[None]:
    """Keep what Inductor compiles in another folder, and let it remember nothing of what it compiled before."""
    clear = _find("torch._inductor.utils", "clear_caches")
    with _kept_environment():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        clear()
        try:
            yield
        finally:
            clear()


def memory_events(profile: torch.profiler.profile) -> list[int]:
    """The bytes that a profile with ``profile_memory`` saw handed out (or taken back, negative), in order.

    Raises:
        RuntimeError: if this torch does not tell.
    """
    results = getattr(profile.profiler, "kineto_results", None)
    if results is None:
        raise RuntimeError(f"this torch ({torch.__version__}) does not tell what its profiler saw of the memory")
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def is_profiling() -> bool:
    """Whether torch's profiler is running in this process."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


@functools.cache
def _import_dynamo() -> None:
    """Import what the first use of a dispatch mode imports: it leaves a variable in the environment."""
    with _kept_environment():
        import_module("torch._dynamo")


@contextlib.contextmanager
def _kept_environment() -> Iterator[None]:
    """Torch's compiler hands settings and pointers on through environment variables, and leaves them there."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)


def reads_a_value(error: BaseException) -> bool:
    """Whether an error of :func:`trace` says that the value of a tensor was asked for."""
    fake, symbolic = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
    kinds = (
        _find(fake, "DataDependentOutputException"),
        _find(fake, "DynamicOutputShapeException"),
        _find(symbolic, "GuardOnDataDependentSymNode"),
    )
    return isinstance(error, kinds) or "data-dependent" in str(error) or ".item()" in str(error)


def is_operation(func: Any) -> bool:
    """Whether this is one tensor operation, and no operator that runs functions of its own such as ``torch.cond``."""
    return isinstance(func, torch._ops.OpOverload)


def keeps_elements(func: Any) -> bool:
    """Whether an operation gives its operand's elements in their order under another shape."""
    aten = torch.ops.aten
    return func in (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.detach.default,
        aten.alias.default,
    )


def is_elementwise(func: Any) -> bool:
    """Whether each element of an operation's result depends on the elements in its place alone."""
    converts = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    return is_operation(func) and (torch.Tag.pointwise in func.tags or func in converts)


def gives_number(func: Any) -> bool:
    """Whether this operation hands a tensor's value to Python."""
    return func is torch.ops.aten._local_scalar_dense.default


def schema(func: Any) -> Any:
    """The schema of an aten operation: its arguments with names and defaults, and whether it writes into one."""
    return func._schema


def module_tables(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The dictionaries in which a module keeps its own parameters, buffers and submodules."""
    return {"params": module._parameters, "buffers": module._buffers, "modules": module._modules}


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this is a module that ``torch.compile`` wrapped."""
    return hasattr(module, "_orig_mod")


def has_hooks(param: Tensor) -> bool:
    """Whether somebody registered a hook on a parameter, of either kind."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def switch_onednn(*, on: bool | None = None) -> bool:
    """Let torch use oneDNN's kernels on the CPU or not, where that is said; returns what was set before."""
    before = bool(torch._C._get_mkldnn_enabled())
    if on is not None:
        torch._C._set_mkldnn_enabled(on)
    return before


def storage_of(tensor: Tensor) -> int | None:
    """What identifies a tensor's storage (a fake one's too) as long as it lives; ``None`` for a sparse tensor."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
