"""The Triton kernels of the tiles. triton_tiles.py launches them and says what they cost.

A program of `statistics_kernel`, `slopes_kernel` and `sigmoid_kernel` computes one tile of products x @ y.T, with float32 sums,
and keeps it in registers. No program waits for another and none adds to what another has written, so two runs give the same
bits. Names of arguments: rows and columns are those of the logits, width is that of the features; `block_…` are sizes of tiles.

Masks of pairs: `partner` is (i, own_start + i); `excluded` pairs (i, own_start + i + d) lie in own columns, which end before
own_stop; `same` pairs have the same id. `where` of a log-sum-exp: 0 for all pairs, 1 for those with the same id, 2 for others.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers, numbers and tiles, for which there are no Python types.

import triton
import triton.language as tl

ALL, SAME, OTHER = 0, 1, 2

# A batch of another size must not compile the kernels again.
_SIZES = ["n_rows", "n_columns", "first", "last", "own_start", "own_stop", "excluded0", "excluded1", "excluded2"]


@triton.jit
def _factor(scale, scale_is_tensor: tl.constexpr, times: tl.constexpr):
    """scale * times. A scale that is a number has been multiplied by the host."""
    if scale_is_tensor:
        return (tl.load(scale).to(tl.float64) * times).to(tl.float32)
    else:
        return tl.full((), scale, tl.float32)


@triton.jit
def _tile_index(program, row_blocks, column_blocks):
    """Row and column of the tile: eight rows of tiles at a time, so that their features are still in the L2 cache."""
    size = 8 * column_blocks
    first = program // size * 8
    height = tl.minimum(row_blocks - first, 8)
    rest = program % size
    return first + rest % height, rest // height


@triton.jit
def _dot_products(
    x, y, rows, columns, n_rows, n_columns, width, x_stride, y_stride,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_width: tl.constexpr, even: tl.constexpr,
    float32_dot: tl.constexpr,
):  # fmt: skip
    """A tile of x @ y.T. Rows and columns beyond the last are copies of it, which the caller masks."""
    k = tl.arange(0, block_width)
    x += tl.minimum(rows, n_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    y += tl.minimum(columns, n_columns - 1).to(tl.int64)[None, :] * y_stride + k[:, None]
    tile = tl.zeros((block_rows, block_columns), tl.float32)
    for start in range(0, width, block_width):
        if even:
            a = tl.load(x)
            b = tl.load(y)
        else:
            a = tl.load(x, mask=(k < width - start)[None, :], other=0.0)
            b = tl.load(y, mask=(k < width - start)[:, None], other=0.0)
        tile = tl.dot(a, b, tile, input_precision=float32_dot)
        x += block_width
        y += block_width
    return tile


@triton.jit
def _taking_part(
    rows, columns, n_rows, n_columns, own_start, own_stop, excluded0, excluded1, excluded2, excluded_diagonals: tl.constexpr
):
    """The pairs that exist and are not excluded."""
    takes_part = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    if excluded_diagonals > 0:
        own = ((columns >= own_start) & (columns < own_stop))[None, :]
        apart = columns[None, :] - own_start - rows[:, None]
        excluded = apart == excluded0
        if excluded_diagonals > 1:
            excluded = excluded | (apart == excluded1)
        if excluded_diagonals > 2:
            excluded = excluded | (apart == excluded2)
        takes_part = takes_part & ~(excluded & own)
    return takes_part


@triton.jit
def _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns):
    of_rows = tl.load(row_ids + tl.minimum(rows, n_rows - 1))
    of_columns = tl.load(column_ids + tl.minimum(columns, n_columns - 1))
    return of_rows[:, None] == of_columns[None, :]


@triton.jit
def _store_log_sums(parts, n, index, ok, logits, axis: tl.constexpr):
    """Store shift and sum of 2**(logits - shift) along `axis`. The shift is -inf where all logits are."""
    top = tl.max(logits, axis)
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(parts + index, top, mask=ok)
    tl.store(parts + n + index, tl.sum(tl.exp2(logits - tl.expand_dims(shift, axis)), axis), mask=ok)


@triton.jit
def _choose(logits, row_ids, column_ids, rows, columns, n_rows, n_columns, where: tl.constexpr, factor: tl.constexpr):
    """The logits of one log-sum-exp; the others are -inf."""
    if where == 1:
        same = _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns)
        logits = tl.where(same, logits, -float("inf"))
    if where == 2:
        same = _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns)
        logits = tl.where(same, -float("inf"), logits)
    if factor != 1.0:
        logits = logits * factor
    return logits


@triton.jit(do_not_specialize=_SIZES)
def statistics_kernel(
    x, y, scale, row_ids, column_ids, row_parts, column_parts, diagonal,
    n_rows, n_columns, width, x_stride, y_stride, own_start, own_stop, excluded0, excluded1, excluded2,
    factors: tl.constexpr, where: tl.constexpr, excluded_diagonals: tl.constexpr, by_column: tl.constexpr,
    same_id_sums: tl.constexpr, has_diagonal: tl.constexpr, scale_is_tensor: tl.constexpr, log2e: tl.constexpr,
    even: tl.constexpr, float32_dot: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Statistics of the rows and columns of each tile: (shift and sum of each log-sum-exp, ..., tiles along the other side, n).

    Sum and number of the logits with the same id come last. `diagonal`: the products of partners, without the scale.
    """
    row_blocks = tl.cdiv(n_rows, block_rows)
    column_blocks = tl.cdiv(n_columns, block_columns)
    row_block, column_block = _tile_index(tl.program_id(0), row_blocks, column_blocks)
    rows = row_block * block_rows + tl.arange(0, block_rows)
    columns = column_block * block_columns + tl.arange(0, block_columns)
    factor = _factor(scale, scale_is_tensor, log2e)
    tile = _dot_products(
        x, y, rows, columns, n_rows, n_columns, width, x_stride, y_stride, block_rows, block_columns, block_width, even,
        float32_dot,
    )  # fmt: skip
    if has_diagonal:
        partner = columns[None, :] == rows[:, None] + own_start
        found = (rows + own_start >= column_block * block_columns) & (rows + own_start < (column_block + 1) * block_columns)
        tl.store(diagonal + rows, tl.sum(tl.where(partner, tile, 0.0), 1), mask=found & (rows < n_rows))
    takes_part = _taking_part(
        rows, columns, n_rows, n_columns, own_start, own_stop, excluded0, excluded1, excluded2, excluded_diagonals
    )
    logits = tl.where(takes_part, tile * factor, -float("inf"))
    row_size = column_blocks.to(tl.int64) * n_rows  # of one kind of number
    column_size = row_blocks.to(tl.int64) * n_columns
    row_index = column_block.to(tl.int64) * n_rows + rows
    column_index = row_block.to(tl.int64) * n_columns + columns
    row_ok = rows < n_rows
    column_ok = columns < n_columns
    for k in tl.static_range(len(factors)):
        chosen = _choose(logits, row_ids, column_ids, rows, columns, n_rows, n_columns, where[k], factors[k])
        _store_log_sums(row_parts + 2 * k * row_size, row_size, row_index, row_ok, chosen, 1)
        if by_column:
            _store_log_sums(column_parts + 2 * k * column_size, column_size, column_index, column_ok, chosen, 0)
    if same_id_sums:
        same = _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns) & (logits != -float("inf"))
        sums = tl.where(same, logits, 0.0)
        ones = tl.where(same, 1.0, 0.0)
        row_parts += 2 * len(factors) * row_size
        tl.store(row_parts + row_index, tl.sum(sums, 1), mask=row_ok)
        tl.store(row_parts + row_size + row_index, tl.sum(ones, 1), mask=row_ok)
        if by_column:
            column_parts += 2 * len(factors) * column_size
            tl.store(column_parts + column_index, tl.sum(sums, 0), mask=column_ok)
            tl.store(column_parts + column_size + column_index, tl.sum(ones, 0), mask=column_ok)


@triton.jit
def _join_tiles(
    parts, results, i, n, tiles, statistic_stride, stride, log_sum_exps: tl.constexpr, same_id_sums: tl.constexpr,
    block_parts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    ok = i < n
    size = tiles.to(tl.int64) * n
    results += i.to(tl.int64) * stride
    p = tl.arange(0, block_parts)
    for k in tl.static_range(log_sum_exps):
        top = tl.full((block,), -float("inf"), tl.float64)
        total = tl.zeros((block,), tl.float64)
        for start in range(0, tiles, block_parts):
            at = 2 * k * size + (start + p).to(tl.int64)[:, None] * n + i[None, :]
            mask = (start + p < tiles)[:, None] & ok[None, :]
            shifts = tl.load(parts + at, mask=mask, other=-float("inf")).to(tl.float64)
            sums = tl.load(parts + size + at, mask=mask, other=0.0).to(tl.float64)
            higher = tl.maximum(top, tl.max(shifts, 0))
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp2(top - shift) + tl.sum(sums * tl.exp2(shifts - shift[None, :]), 0)
            top = higher
        tl.store(results + k * statistic_stride, tl.log2(total) + tl.where(top == -float("inf"), 0.0, top), mask=ok)
    if same_id_sums:
        for k in tl.static_range(2):
            total = tl.zeros((block,), tl.float64)
            for start in range(0, tiles, block_parts):
                at = (2 * log_sum_exps + k) * size + (start + p).to(tl.int64)[:, None] * n + i[None, :]
                mask = (start + p < tiles)[:, None] & ok[None, :]
                total += tl.sum(tl.load(parts + at, mask=mask, other=0.0).to(tl.float64), 0)
            tl.store(results + (log_sum_exps + k) * statistic_stride, total, mask=ok)


@triton.jit(do_not_specialize=["n_rows", "n_columns", "row_tiles", "column_tiles"])
def join_tiles_kernel(
    scale, row_parts, column_parts, products, row_results, column_results, diagonal, n_rows, n_columns, row_tiles, column_tiles,
    log_sum_exps: tl.constexpr, same_id_sums: tl.constexpr, by_column: tl.constexpr, has_diagonal: tl.constexpr,
    scale_is_tensor: tl.constexpr, log2e: tl.constexpr, block_parts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Join the statistics of all tiles in float64: (statistics, rows), and (columns, statistics)."""
    width: tl.constexpr = log_sum_exps + 2 * same_id_sums
    row_programs = tl.cdiv(n_rows, block)
    program = tl.program_id(0)
    if program < row_programs:
        i = program * block + tl.arange(0, block)
        _join_tiles(row_parts, row_results, i, n_rows, column_tiles, n_rows, 1, log_sum_exps, same_id_sums, block_parts, block)
        if has_diagonal:
            value = tl.load(products + i, mask=i < n_rows, other=0.0).to(tl.float64)
            factor = _factor(scale, scale_is_tensor, log2e)
            tl.store(diagonal + i, value * factor.to(tl.float64), mask=i < n_rows)
    elif by_column:
        i = (program - row_programs) * block + tl.arange(0, block)
        _join_tiles(
            column_parts, column_results, i, n_columns, row_tiles, 1, width, log_sum_exps, same_id_sums, block_parts,
            block,
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "n_columns"])
def join_ranks_kernel(
    statistics, results, parts, n_columns,
    log_sum_exps: tl.constexpr, width: tl.constexpr, block_parts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Join (parts, columns, statistics) into (statistics, columns): log-sum-exps first, then sums."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    ok = i < n_columns
    p = tl.arange(0, block_parts)
    for k in tl.static_range(width):
        top = tl.full((block,), -float("inf"), tl.float64)
        total = tl.zeros((block,), tl.float64)
        for start in range(0, parts, block_parts):
            at = ((start + p).to(tl.int64)[:, None] * n_columns + i[None, :]) * width + k
            mask = (start + p < parts)[:, None] & ok[None, :]
            if k < log_sum_exps:
                logs = tl.load(statistics + at, mask=mask, other=-float("inf"))
                higher = tl.maximum(top, tl.max(logs, 0))
                shift = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(logs - shift[None, :]), 0)
                top = higher
            else:
                total += tl.sum(tl.load(statistics + at, mask=mask, other=0.0), 0)
        if k < log_sum_exps:
            total = tl.log2(total) + tl.where(top == -float("inf"), 0.0, top)
        tl.store(results + k * n_columns.to(tl.int64) + i, total, mask=ok)


@triton.jit
def _store_slopes(slopes, slope, rows, columns, n_rows, plane, stride, planes: tl.constexpr):
    """Round to the dtype of `slopes`; a second plane takes what is left, with as many bits again."""
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    rounded = slope.to(slopes.dtype.element_ty)
    tl.store(slopes + at, rounded)
    if planes == 2:
        tl.store(slopes + plane + at, (slope - rounded.to(tl.float32)).to(slopes.dtype.element_ty))


@triton.jit
def _softmax(logits, logs):
    """2**(logits - logs). A sum without any term, which is -inf, has no gradient."""
    return tl.exp2(logits - tl.where(logs == -float("inf"), float("inf"), logs))


@triton.jit(do_not_specialize=_SIZES)
def slopes_kernel(
    x, y, scale, row_ids, column_ids, row_logs, row_grads, column_logs, column_grads, diagonal_grads, lift, slopes,
    n_rows, n_columns, first, width, x_stride, y_stride, own_start, own_stop, excluded0, excluded1, excluded2,
    row_logs_stride, row_grads_stride, logs_by_statistic, logs_by_column, grads_by_statistic, grads_by_column,
    slopes_plane, slopes_stride,
    factors: tl.constexpr, where: tl.constexpr, excluded_diagonals: tl.constexpr, by_column: tl.constexpr,
    same_id_sums: tl.constexpr, has_diagonal: tl.constexpr, has_lift: tl.constexpr, scale_is_tensor: tl.constexpr,
    log2e: tl.constexpr, even: tl.constexpr, float32_dot: tl.constexpr, planes: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """The slopes of the columns from `first` on: (planes, rows, columns), padded to whole tiles with zeros."""
    row_blocks = tl.cdiv(n_rows, block_rows)
    row_block, column_block = _tile_index(tl.program_id(0), row_blocks, slopes_stride // block_columns)
    rows = row_block * block_rows + tl.arange(0, block_rows)
    places = column_block * block_columns + tl.arange(0, block_columns)
    columns = first + places
    factor = _factor(scale, scale_is_tensor, log2e)
    tile = _dot_products(
        x, y, rows, columns, n_rows, n_columns, width, x_stride, y_stride, block_rows, block_columns, block_width, even,
        float32_dot,
    )  # fmt: skip
    takes_part = _taking_part(
        rows, columns, n_rows, n_columns, own_start, own_stop, excluded0, excluded1, excluded2, excluded_diagonals
    )
    logits = tl.where(takes_part, tile * factor, -float("inf"))
    row_ok = rows < n_rows
    column_ok = columns < n_columns
    at = columns.to(tl.int64)
    slope = tl.zeros((block_rows, block_columns), tl.float32)
    for k in tl.static_range(len(factors)):
        chosen = _choose(logits, row_ids, column_ids, rows, columns, n_rows, n_columns, where[k], factors[k])
        logs = tl.load(row_logs + k * row_logs_stride + rows, mask=row_ok, other=0.0).to(tl.float32)
        grads = tl.load(row_grads + k * row_grads_stride + rows, mask=row_ok, other=0.0).to(tl.float32) * factors[k]
        slope += _softmax(chosen, logs[:, None]) * grads[:, None]
        if by_column:
            logs = tl.load(column_logs + k * logs_by_statistic + at * logs_by_column, mask=column_ok, other=0.0).to(tl.float32)
            grads = tl.load(column_grads + k * grads_by_statistic + at * grads_by_column, mask=column_ok, other=0.0).to(
                tl.float32
            )
            slope += _softmax(chosen, logs[None, :]) * (grads * factors[k])[None, :]
    if same_id_sums:
        linear = tl.load(row_grads + len(factors) * row_grads_stride + rows, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        if by_column:
            grads = tl.load(
                column_grads + len(factors) * grads_by_statistic + at * grads_by_column,
                mask=column_ok,
                other=0.0,
            )
            linear = linear + grads.to(tl.float32)[None, :]
        same = _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns) & (logits != -float("inf"))
        slope += tl.where(same, linear, 0.0)
    if has_diagonal:
        partner = columns[None, :] == rows[:, None] + own_start
        grads = tl.load(diagonal_grads + rows, mask=row_ok, other=0.0).to(tl.float32)
        slope += tl.where(partner, grads[:, None], 0.0)
    if has_lift:
        slope = slope * tl.load(lift)
    _store_slopes(slopes, slope, rows, places, n_rows, slopes_plane, slopes_stride, planes)


@triton.jit
def _log1p(x, sums):
    """log(1 + x) for x in [0, 1], where `sums` is 1 + x rounded: log(sums) alone has no digits of a tiny x."""
    rounded = sums - 1.0
    return tl.where(rounded == 0.0, x, tl.log(sums) * (x / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit(do_not_specialize=_SIZES)
def sigmoid_kernel(
    x, y, scale, bias, row_ids, column_ids, row_weights, column_weights, lift, row_parts, column_losses, slopes,
    n_rows, n_columns, first, last, width, x_stride, y_stride, own_start, own_stop, excluded0, excluded1,
    excluded2, slopes_plane, slopes_stride,
    excluded_diagonals: tl.constexpr, has_ids: tl.constexpr, masked: tl.constexpr, has_partners: tl.constexpr,
    has_weights: tl.constexpr, has_lift: tl.constexpr, wants_slopes: tl.constexpr, scale_is_tensor: tl.constexpr,
    bias_is_tensor: tl.constexpr, log2e: tl.constexpr, even: tl.constexpr, float32_dot: tl.constexpr, planes: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Sums of the losses, and of the slopes, of the rows of each tile: (2, tiles, rows); losses of columns: (tiles, columns).

    The columns are those from `first` to `last`; the slopes are as in slopes_kernel.
    """
    row_blocks = tl.cdiv(n_rows, block_rows)
    row_block, column_block = _tile_index(tl.program_id(0), row_blocks, tl.cdiv(last - first, block_columns))
    rows = row_block * block_rows + tl.arange(0, block_rows)
    places = column_block * block_columns + tl.arange(0, block_columns)
    columns = first + places
    tile = _dot_products(
        x, y, rows, columns, n_rows, n_columns, width, x_stride, y_stride, block_rows, block_columns, block_width, even,
        float32_dot,
    )  # fmt: skip
    row_ok = rows < n_rows
    column_ok = columns < n_columns
    takes_part = row_ok[:, None] & column_ok[None, :]
    logits = tile * _factor(scale, scale_is_tensor, 1.0) + _factor(bias, bias_is_tensor, 1.0)
    positive = (columns - own_start)[None, :] == rows[:, None]
    if not has_partners:
        positive = rows[:, None] < 0
    if has_ids:
        same = _same_ids(row_ids, column_ids, rows, columns, n_rows, n_columns) & _taking_part(
            rows, columns, n_rows, n_columns, own_start, own_stop, excluded0, excluded1, excluded2, excluded_diagonals
        )
        if masked:
            takes_part = takes_part & ~same
        else:
            positive = positive | same
    # The loss is softplus(exponents), its derivative the sigmoid: both are zero where the exponent is -inf.
    exponents = tl.where(takes_part, tl.where(positive, -logits, logits), -float("inf"))
    small = tl.exp2(-tl.abs(exponents) * log2e)
    sums = 1.0 + small
    losses = tl.maximum(exponents, 0.0) + _log1p(small, sums)
    row_index = (first // block_columns + column_block).to(tl.int64) * n_rows + rows
    # There may be tiles of padding only.
    stored = row_ok & (first + column_block * block_columns + tl.zeros_like(rows) < n_columns)
    tl.store(row_parts + row_index, tl.sum(losses, 1), mask=stored)
    if has_weights:
        column_index = row_block.to(tl.int64) * n_columns + columns
        tl.store(column_losses + column_index, tl.sum(losses, 0), mask=column_ok)
    if wants_slopes:
        slope = tl.where(exponents >= 0, 1.0, small) / sums  # NaN stays NaN in `small`
        slope = tl.where(positive, -slope, slope)
        if has_weights:
            of_rows = tl.load(row_weights + rows, mask=row_ok, other=0.0).to(tl.float32)
            of_columns = tl.load(column_weights + columns, mask=column_ok, other=0.0).to(tl.float32)
            slope = slope * ((of_rows[:, None] + of_columns[None, :]) * 0.5)
        row_size = tl.cdiv(n_columns, block_columns).to(tl.int64) * n_rows
        tl.store(row_parts + row_size + row_index, tl.sum(slope, 1), mask=stored)
        if has_lift:
            slope = slope * tl.load(lift)
        _store_slopes(slopes, slope, rows, places, n_rows, slopes_plane, slopes_stride, planes)


@triton.jit
def _slope_product(
    slopes, features, m, n, start, stop, last, plane, m_stride, k_stride, features_stride, width,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, planes: tl.constexpr, float32_dot: tl.constexpr,
):  # fmt: skip
    """A tile of slopes @ features over the k from `start` to `stop`. Slopes beyond `last` are zeros."""
    k = tl.arange(0, block_k)
    total = tl.zeros((block_m, block_n), tl.float32)
    slopes += m.to(tl.int64)[:, None] * m_stride
    for first in range(start, stop, block_k):
        at = slopes + (first + k).to(tl.int64)[None, :] * k_stride
        b = tl.load(
            features + tl.minimum(first + k, last - 1).to(tl.int64)[:, None] * features_stride + n[None, :],
            mask=(n < width)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.load(at), b, total, input_precision=float32_dot)
        if planes == 2:
            total = tl.dot(tl.load(at + plane), b, total, input_precision=float32_dot)
    return total


@triton.jit(do_not_specialize=["n_rows", "n_columns", "row_programs", "split", "accumulate"])
def products_kernel(
    slopes, x, y, lift, dx, dy, n_rows, n_columns, width, x_stride, y_stride, dx_plane, dy_stride, slopes_plane, slopes_stride,
    row_programs, split, accumulate,
    wants_dy: tl.constexpr, has_lift: tl.constexpr, planes: tl.constexpr, float32_dot: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """dx (+)= slopes @ y by the first programs, dy = slopes.T @ x by the others.

    The columns are cut in parts of `split`, one plane of dx for each: few rows would keep few processors busy.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(width, block_n)
    unlift = 1.0
    if has_lift:
        unlift = 1.0 / tl.load(lift)
    if program < row_programs:
        row_blocks = tl.cdiv(n_rows, block_m)
        part = program // (row_blocks * blocks)
        row_block, block = _tile_index(program % (row_blocks * blocks), row_blocks, blocks)
        m = row_block * block_m + tl.arange(0, block_m)
        n = block * block_n + tl.arange(0, block_n)
        total = _slope_product(
            slopes, y, m, n, part * split, tl.minimum((part + 1) * split, slopes_stride), n_columns, slopes_plane,
            slopes_stride, 1, y_stride, width, block_m, block_n, block_k, planes, float32_dot,
        )  # fmt: skip
        at = dx + part.to(tl.int64) * dx_plane + m.to(tl.int64)[:, None] * width + n[None, :]
        ok = (m < n_rows)[:, None] & (n < width)[None, :]
        total = total * unlift
        if accumulate != 0:
            total += tl.load(at, mask=ok, other=0.0)
        tl.store(at, total, mask=ok)
    elif wants_dy:
        program -= row_programs
        m_block, block = _tile_index(program, slopes_stride // block_m, blocks)
        m = m_block * block_m + tl.arange(0, block_m)
        n = block * block_n + tl.arange(0, block_n)
        total = _slope_product(
            slopes, x, m, n, 0, n_rows, n_rows, slopes_plane, 1, slopes_stride, x_stride, width, block_m, block_n, block_k,
            planes, float32_dot,
        )  # fmt: skip
        ok = (m < n_columns)[:, None] & (n < width)[None, :]
        tl.store(dy + m.to(tl.int64)[:, None] * dy_stride + n[None, :], total * unlift, mask=ok)


@triton.jit(do_not_specialize=["n_rows"])
def softmax_tail_kernel(
    row_logs, column_logs, diagonal, losses, slopes, diagonal_slopes, n_rows,
    by_column: tl.constexpr, log2e: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sums of softplus(log-sum-exp - diagonal), its derivatives (1 or 2, rows), and minus their sum by row."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    ok = i < n_rows
    partner = tl.load(diagonal + i, mask=ok, other=0.0)
    loss = tl.zeros((block,), tl.float64)
    total = tl.zeros((block,), tl.float64)
    for k in tl.static_range(1 + by_column):
        logs = tl.load((column_logs if k else row_logs) + i, mask=ok, other=-float("inf"))
        excess = (logs - partner) / log2e
        small = tl.exp(-tl.abs(excess))
        sums = 1.0 + small
        loss += tl.maximum(excess, 0.0) + _log1p(small, sums)
        slope = tl.where(excess >= 0, 1.0, small) / sums
        total += slope
        tl.store(slopes + k * n_rows + i, slope.to(slopes.dtype.element_ty), mask=ok)
    tl.store(diagonal_slopes + i, (-total).to(diagonal_slopes.dtype.element_ty), mask=ok)
    tl.store(losses + tl.program_id(0), tl.sum(tl.where(ok, loss, 0.0), 0))


@triton.jit(do_not_specialize=["n_rows"])
def sum_of_products_kernel(x, dx, sums, n_rows, width, x_stride, block_rows: tl.constexpr, block_width: tl.constexpr):
    """The sum of x * dx over some rows, in float64 from one row to the next."""
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    k = tl.arange(0, block_width)
    total = tl.zeros((block_rows,), tl.float32)
    for start in range(0, width, block_width):
        ok = (rows < n_rows)[:, None] & (start + k < width)[None, :]
        a = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + start + k[None, :], mask=ok, other=0.0).to(tl.float32)
        b = tl.load(dx + rows.to(tl.int64)[:, None] * width + start + k[None, :], mask=ok, other=0.0)
        total += tl.sum(a * b, 1)
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.float64), 0))
