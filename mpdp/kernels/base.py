"""Kernels: the interface of the arithmetic that a training step does on arrays.

One subclass a kind of device implements it; operations get an instance ``k`` and use ``k.xp`` for plain
array calls and these methods for everything that a device does better in one piece. Kernels know arrays
and nothing of tensors, tapes or ranks.

Three conventions hold throughout:

- A method with ``out`` and ``beta`` writes ``value + beta * out`` into ``out`` (``beta`` is 0 or 1; with 0
  the old contents are never read) and returns it; without ``out`` it returns a new array.
- ``saved`` is whatever the matching ``_backward`` needs. It belongs to the caller, is used at most once, and
  may be overwritten by the backward method.
- No method reads a device array on the host, except the checks of indices on the CPU, and ``to_numpy`` and
  ``checksum``, whose results are on the host. Methods of a GPU return before the work is done; what a check
  finds there is asked for later, with :meth:`Kernels.pending_error`.

Shapes: N rows (samples, or samples times positions), C classes, D features.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..device import CPU, Device
from .board import Board
from .image_interface import Array, ImageKernels, Shape

if TYPE_CHECKING:
    from .plan_book import PlanBook

ACTIVATIONS = (None, "relu", "gelu")  # what `linear` applies to its result
Into = tuple[Array | None, float] | None  # where a gradient goes, and what the old contents count
ATTENTIONS = ("auto", "cudnn", "plain")  # the engines of `attention`


class Kernels(ImageKernels):
    """Arithmetic on the arrays of one device. **Local.**

    Attributes:
        xp: the array module, ``numpy`` or ``cupy``.
        device_kind: ``"cpu"`` or ``"cuda"``.
        device: the device.
        plan_book: what libraries' plans are looked up in; nothing asks that of a CPU.
    """

    xp: ModuleType
    device_kind: str
    device: Device = CPU
    plan_book: PlanBook

    # -- the device and the step ---------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Return whether arrays that are made now are made on this device."""
        return True

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which this device is the current one of the thread."""
        return nullcontext()

    def begin_step(self, step: Any) -> None:
        """Say which step the calls that follow belong to, for errors that are found later.

        Args:
            step: number of the update, or a 0-d int64 array on the device (read when a check runs).
        """

    def pending_error(self) -> Exception | None:
        """Return, once, the first error that a check on the device has found; None if there is none.

        Never waits: it sees what the device has finished. Ask after something that waits anyway (the loss of
        the step that was read), once a step, and raise what it returns through the world, as any error of a
        rank. The message names the step that :meth:`begin_step` said. On the CPU checks raise at once.
        """
        return None

    def board(self, slots: int, numbers: int, sources: int, reports: int) -> Board:
        """Return a new :class:`~mpdp.kernels.board.Board`, where a captured step keeps what changes."""
        raise NotImplementedError

    # -- storage -------------------------------------------------------------------------------------------

    def from_host(self, array: Array) -> Array:
        """Return a NumPy array's contents on this device: the array itself on the CPU, a copy on a GPU."""
        raise NotImplementedError

    def to_numpy(self, array: Array) -> Array:
        """Return the contents as a NumPy array: the same memory on the CPU, a copy from a GPU."""
        raise NotImplementedError

    def store(self, value: Array, out: Array, beta: float = 0.0) -> Array:
        """Write ``value + beta * out`` into ``out``; dtypes may differ by a cast between floats."""
        raise NotImplementedError

    # -- products ------------------------------------------------------------------------------------------

    def gemm(self, a: Array, b: Array, out: Array | None = None, beta: float = 0.0) -> Array:
        """Multiply matrices over the last two axes; the others broadcast as in ``numpy.matmul``.

        Either operand may be a transposed view. Both have at least two axes.
        """
        raise NotImplementedError

    def linear(
        self, x: Array, weight: Array, bias: Array | None, activation: str | None = None
    ) -> tuple[Array, Any]:
        """Return (activation(x @ weight.T + bias), saved) for x of shape (N, i) and weight of shape (o, i).

        ``activation`` is one of ``ACTIVATIONS``: :meth:`relu`, :meth:`gelu` or nothing. 16-bit floats are rounded
        once, after it. Without one, saved is None.
        """
        raise NotImplementedError

    def activation_backward(
        self,
        g: Array,
        saved: Any,
        activation: str | None,
        sums: bool = False,
        out: Array | None = None,
        beta: float = 0.0,
    ) -> tuple[Array, Array | None]:
        """Return the gradient of :meth:`linear` before its activation, and if ``sums`` the sums of that over rows.

        The first is what both products of backward start from (g itself without an activation), the second is the
        gradient of the bias, written to ``out`` where there is one.
        """
        raise NotImplementedError

    def linear_backward(
        self,
        g: Array,
        saved: Any,
        activation: str | None,
        x: Array,
        weight: Array,
        into: tuple[Into, Into, Into],
    ) -> list[Array | None]:
        """Return the gradients of x, weight and bias from the gradient of :meth:`linear`.

        ``into`` says of each where it goes: None where nobody wants it, (None, 0.0) for a new array, or (out, beta).
        """
        g, bias = self.activation_backward(g, saved, activation, into[2] is not None, *(into[2] or ()))
        of_x = None if into[0] is None else self.gemm(g, weight, *into[0])
        of_weight = None if into[1] is None else self.gemm(g.T, x, *into[1])
        return [of_x, of_weight, bias]

    # -- reductions ----------------------------------------------------------------------------------------

    def sum(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        """Sum over axes, 16-bit floats in float32; the result has the dtype of x."""
        raise NotImplementedError

    def mean(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        """Average over axes, 16-bit floats in float32; 0 where there is nothing to average."""
        raise NotImplementedError

    def sum_to(self, x: Array, shape: Shape, out: Array | None = None, beta: float = 0.0) -> Array:
        """Sum x over the axes along which ``shape`` was broadcast to x's shape.

        Without ``out`` the result may be x itself, when nothing was broadcast.
        """
        raise NotImplementedError

    # -- elementwise ---------------------------------------------------------------------------------------

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b of arrays of one shape and dtype."""
        raise NotImplementedError

    def relu(self, x: Array) -> Array:
        """Return max(x, 0)."""
        raise NotImplementedError

    def relu_backward(self, g: Array, out: Array) -> Array:
        """Return g where ``out`` (of :meth:`relu`) is positive, else 0."""
        raise NotImplementedError

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x)), without overflow for any x."""
        raise NotImplementedError

    def sigmoid_backward(self, g: Array, out: Array) -> Array:
        """Return g * out * (1 - out)."""
        raise NotImplementedError

    def tanh_backward(self, g: Array, out: Array) -> Array:
        """Return g * (1 - out^2)."""
        raise NotImplementedError

    def gelu(self, x: Array) -> tuple[Array, Any]:
        """Return (out, saved) of the tanh form, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
        raise NotImplementedError

    def gelu_backward(self, g: Array, saved: Any) -> Array:
        """Return the gradient of :meth:`gelu` with respect to x."""
        raise NotImplementedError

    def dropout(self, x: Array, mask: Array, scale: float) -> Array:
        """Return x * scale where the boolean ``mask`` is True, else 0."""
        raise NotImplementedError

    def keep_mask(
        self, key: tuple[int, int], step: Any, start: Any, count: int, elements: int, threshold: int
    ) -> Array:
        """Return where ``kernels.random.bits(...) >= threshold``: boolean, of shape (count, elements).

        ``step`` and ``start`` are numbers, or 0-d int64 arrays on the device.
        """
        raise NotImplementedError

    # -- normalisation -------------------------------------------------------------------------------------

    def softmax(self, x: Array, axis: int) -> Array:
        """Return exp(x - max) / sum(exp(x - max)) along ``axis``."""
        raise NotImplementedError

    def softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        """Return out * (g - sum(g * out))."""
        raise NotImplementedError

    def log_softmax(self, x: Array, axis: int) -> Array:
        """Return x - max - log(sum(exp(x - max))) along ``axis``."""
        raise NotImplementedError

    def log_softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        """Return g - exp(out) * sum(g)."""
        raise NotImplementedError

    def layer_norm(self, x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Any]:
        """Normalise each row of x (N, D) to mean 0 and variance 1, then scale and shift by (D,) arrays.

        Statistics are taken in two passes, in float32 or wider. Returns (out, saved).
        """
        raise NotImplementedError

    def layer_norm_backward(self, g: Array, saved: Any, weight: Array | None) -> Array:
        """Return the gradient of :meth:`layer_norm` with respect to x; leaves ``saved`` intact."""
        raise NotImplementedError

    def layer_norm_weight_gradient(
        self, g: Array, saved: Any, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        """Return the gradient with respect to the weight: the sum over rows of g times normalised x."""
        raise NotImplementedError

    def add_layer_norm(
        self, x: Array, added: Array, weight: Array | None, bias: Array | None, eps: float
    ) -> tuple[Array, Array, Any]:
        """Return (sum, out, saved): x + added (N, D), and what :meth:`layer_norm` makes of that sum."""
        raise NotImplementedError

    def layer_norm_gradients(
        self,
        g: Array,
        saved: Any,
        weight: Array | None,
        before: Array | None,
        x: bool,
        weight_into: tuple[Array, float] | None,
        bias_into: tuple[Array, float] | None,
    ) -> Array | None:
        """Write the gradients of :meth:`layer_norm` that are wanted; leaves ``saved`` intact.

        Args:
            g: the gradient of the result, (N, D).
            saved, weight: as of forward.
            before: a gradient of x that is there already, (N, D), or None.
            x: whether the gradient with respect to x is wanted.
            weight_into, bias_into: (out, beta) of the gradient with respect to weight or bias, (D,); None for none.

        Returns:
            ``before`` plus the gradient with respect to x, or None.
        """
        raise NotImplementedError

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> tuple[Array, Any]:
        """Return x / sqrt(mean(x^2) + eps) * weight of each row of x (N, D), and saved."""
        raise NotImplementedError

    def rms_norm_backward(self, g: Array, saved: Any, weight: Array | None) -> Array:
        """Return the gradient of :meth:`rms_norm` with respect to x; leaves ``saved`` intact."""
        raise NotImplementedError

    def rms_norm_weight_gradient(
        self, g: Array, saved: Any, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        """Return the gradient with respect to the weight: the sum over rows of g times normalised x."""
        raise NotImplementedError

    # -- attention -----------------------------------------------------------------------------------------

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        causal: bool,
        keys: Array | None,
        keep: Array | None,
        keep_scale: float,
        engine: str = "auto",
    ) -> tuple[Array, Any]:
        """Return softmax(scale * q k^T) v and saved, for q (N, H, T, D), k and v (N, H, S, D).

        Args:
            q, k, v: queries, keys and values.
            scale: of the scores.
            causal: whether query t sees keys up to S - T + t only.
            keys: boolean (N, S), False where a key is padding; a query without any key gives 0.
            keep: boolean (N, H, T, S), False where dropout takes a weight away.
            keep_scale: factor on the others.
            engine: ``"plain"`` (products and a softmax), ``"cudnn"``, or ``"auto"``: cuDNN where it has this attention.

        Raises:
            ValueError: ``"cudnn"`` for what it has not.
            MissingDependencyError: ``"cudnn"`` without its package.
        """
        raise NotImplementedError

    def attention_backward(
        self,
        g: Array,
        saved: Any,
        scale: float,
        keep: Array | None,
        keep_scale: float,
        deterministic: bool = True,
        into: tuple[Array, Array, Array] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of :meth:`attention` with respect to q, k and v, in the arrays ``into`` if given.

        Without ``deterministic`` cuDNN may add in an order of its own, faster, with other last bits each time.
        """
        raise NotImplementedError

    def self_attention(
        self,
        qkv: Array,
        scale: float,
        causal: bool,
        keys: Array | None,
        keep: Array | None,
        keep_scale: float,
        engine: str = "auto",
    ) -> tuple[Array, Any]:
        """Return :meth:`attention` as (N, T, H * D), and saved, for qkv (N, T, 3, H, D): queries, keys, values."""
        raise NotImplementedError

    def self_attention_backward(
        self,
        g: Array,
        saved: Any,
        shape: Shape,
        scale: float,
        keep: Array | None,
        keep_scale: float,
        deterministic: bool = True,
    ) -> Array:
        """Return the gradient of :meth:`self_attention` with respect to qkv of ``shape``."""
        raise NotImplementedError

    # -- losses --------------------------------------------------------------------------------------------

    def checks_with_loss(self, logits: Array, target: Array) -> bool:
        """Return whether :meth:`cross_entropy` of these can check the target itself, which saves launches."""
        raise NotImplementedError

    def cross_entropy(
        self, logits: Array, target: Array, ignore_index: int, count: Array | None = None, check: bool = False
    ) -> tuple[Array, Any]:
        """Return the sum over rows of -log softmax(logits)[target], and what its backward needs.

        Args:
            logits: (N, C).
            target: integers (N,), each in 0..C-1 or ``ignore_index`` (checked by the caller).
            ignore_index: the target of rows that add nothing.
            count: what :meth:`check_class_indices` returned, where it is known: a hint that may save work.
            check: do what :meth:`check_class_indices` does too, and write the count into ``count``; only where
                :meth:`checks_with_loss`.

        Returns:
            (sum, saved): the sum is 0-d, of the dtype of logits, but float32 for 16-bit logits.
        """
        raise NotImplementedError

    def cross_entropy_backward(self, g: Array, saved: Any, own: bool = False) -> Array:
        """Return g * (softmax(logits) - onehot(target)), rows of ``ignore_index`` zero, for 0-d g.

        With ``own`` nothing else reads the logits any more, and the result may take their memory.
        """
        raise NotImplementedError

    def squared_error(self, output: Array, target: Array) -> tuple[Array, Any]:
        """Return the sum of (output - target)^2 (0-d, dtype as in :meth:`cross_entropy`) and saved."""
        raise NotImplementedError

    def squared_error_backward(self, g: Array, saved: Any) -> Array:
        """Return 2 * g * (output - target), the gradient with respect to the output, for 0-d g."""
        raise NotImplementedError

    def check_class_indices(self, target: Array, classes: int, ignore_index: int | None) -> Array:
        """Check integer class indices and return how many are not ``ignore_index``.

        On the CPU this reads the array and raises at once; on a GPU :meth:`pending_error` tells later, and the
        loss of such a row is NaN.

        Returns:
            a 0-d float64 array.

        Raises:
            ValueError: a class outside 0..classes-1 that is not ``ignore_index``.
        """
        raise NotImplementedError

    # -- indices -------------------------------------------------------------------------------------------

    def embedding(self, weight: Array, index: Array) -> Array:
        """Return the rows ``weight[index]``.

        Raises:
            ValueError: an index outside 0..len(weight)-1 (negative ones do not wrap round). On a GPU
                :meth:`pending_error` tells later, and such a row is NaN.
        """
        raise NotImplementedError

    def embedding_backward(
        self, g: Array, index: Array, rows: int, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        """Return the (rows, D) array of the sums of g over equal indices, in a fixed order."""
        raise NotImplementedError

    def token_embedding(self, tokens: Array, positions: Array, index: Array) -> Array:
        """Return ``tokens[index] + positions[:T]`` for an index (N, T), with the checks of :meth:`embedding`."""
        raise NotImplementedError

    def scatter(self, g: Array, index: Any, shape: Shape) -> Array:
        """Return zeros of ``shape`` with g added at ``index`` (anything that indexes an array)."""
        raise NotImplementedError
