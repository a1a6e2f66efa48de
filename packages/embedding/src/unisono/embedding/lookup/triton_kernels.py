"""The Triton kernels on rows. triton_rows.py launches them and says what they cost.

A segment is a range of positions whose rows are summed: a bag, or the duplicates of a number. Segment k has the positions from
starts[k] to starts[k + 1], the last one those up to `positions`. A position may be read by way of `order`, and its row by way
of `index`: rows[index[order[p]]], times weights[order[p]].

A row may be hit by each position of a batch. So that no program adds all of them alone, positions are cut into chunks, and
`chunk_sums_kernel` sums each chunk that lies within one segment first. Sums have a fixed order, no program adds to what
another has written, and no product is fused with a sum: two runs give the same bits.

`total` and all that is computed from it have the dtype of the optimizer's state: float32, or float64 for float64 rows. Numbers
of the host come as the bits of a float64, since Triton would round a Python float to float32.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers, numbers and tiles, for which there are no Python types.

import triton
import triton.language as tl

SGD, ROWWISE_ADAGRAD, ADAGRAD, ADAM = 0, 1, 2, 3  # in the order of compiled.cpp

# A batch of another size must not compile the kernels again.
_SIZES = ["segments", "positions", "searches", "first_row", "last_row", "n", "blocks"]
_NUMBERS = ["factor", "weight_decay", "rate", "eps", "row_width", "part1", "beta2", "part2"]


@triton.jit
def _number(bits, dtype: tl.constexpr):
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def _divide(x, y):
    """Rounded as on a CPU."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def _square_root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _add_rows(
    total, rows, index, order, weights, first, last, columns, width,
    has_index: tl.constexpr, has_order: tl.constexpr, has_weights: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Add the rows of the positions from `first` to `last` to `total`, some at a time."""
    inside = (columns < width)[None, :]
    for start in range(first, last, block_rows):
        position = start + tl.arange(0, block_rows)
        ok = position < last
        if has_order:
            position = tl.load(order + position, mask=ok, other=0)
        row = position.to(tl.int64)
        if has_index:
            row = tl.load(index + position, mask=ok, other=0).to(tl.int64)
        tile = tl.load(rows + row[:, None] * width + columns[None, :], mask=ok[:, None] & inside, other=0.0).to(total.dtype)
        if has_weights:
            tile = tile * tl.load(weights + position, mask=ok, other=0.0).to(total.dtype)[:, None]
        total += tl.sum(tile, 0)
    return total


@triton.jit
def _sum_segment(
    rows, index, order, weights, chunk_sums, first, last, columns, width, chunk,
    has_index: tl.constexpr, has_order: tl.constexpr, has_weights: tl.constexpr, has_chunks: tl.constexpr,
    dtype: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """The sum of a segment: its positions before its first whole chunk, the sums of its chunks, the positions after them."""
    total = tl.zeros((block_width,), dtype)
    if has_chunks:
        first_chunk = (first + chunk - 1) // chunk
        last_chunk = tl.maximum(last // chunk, first_chunk)
        before = tl.minimum(first_chunk * chunk, last)
        total = _add_rows(
            total, rows, index, order, weights, first, before, columns, width, has_index, has_order, has_weights, block_rows
        )
        total = _add_rows(
            total, chunk_sums, index, order, weights, first_chunk, last_chunk, columns, width, False, False, False, block_rows
        )
        first = tl.maximum(last_chunk * chunk, first)
    return _add_rows(
        total, rows, index, order, weights, first, last, columns, width, has_index, has_order, has_weights, block_rows
    )


@triton.jit(do_not_specialize=_SIZES)
def chunk_sums_kernel(
    rows, index, order, weights, starts, chunk_sums, segments, positions, searches, width, chunk,
    has_index: tl.constexpr, has_order: tl.constexpr, has_weights: tl.constexpr,
    block_rows: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Sum the positions of one whole chunk, if they all belong to one segment. Other chunks are left as they are."""
    number = tl.program_id(0).to(tl.int64)
    first = number * chunk
    low = first * 0
    high = low + segments
    for _ in range(searches):  # for the last segment that begins at `first` or before
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) <= first
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    end = tl.load(starts + low + 1, mask=low + 1 < segments, other=positions)
    if end >= first + chunk:
        columns = tl.program_id(1) * block_width + tl.arange(0, block_width)
        total = tl.zeros((block_width,), chunk_sums.dtype.element_ty)
        total = _add_rows(
            total, rows, index, order, weights, first, first + chunk, columns, width,
            has_index, has_order, has_weights, block_rows,
        )  # fmt: skip
        tl.store(chunk_sums + number * width + columns, total, mask=columns < width)


@triton.jit(do_not_specialize=_SIZES)
def sum_bags_kernel(
    rows, index, order, weights, starts, chunk_sums, out, segments, positions, width, chunk,
    has_index: tl.constexpr, has_order: tl.constexpr, has_weights: tl.constexpr, has_chunks: tl.constexpr,
    dtype: tl.constexpr, block_rows: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """Sum each segment. A program takes one segment after the other."""
    for bag in range(tl.program_id(0).to(tl.int64), segments, tl.num_programs(0)):
        first = tl.load(starts + bag)
        last = tl.load(starts + bag + 1, mask=bag + 1 < segments, other=positions)
        for start in range(0, width, block_width):
            columns = start + tl.arange(0, block_width)
            total = _sum_segment(
                rows, index, order, weights, chunk_sums, first, last, columns, width, chunk,
                has_index, has_order, has_weights, has_chunks, dtype, block_rows, block_width,
            )  # fmt: skip
            tl.store(out + bag * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _gradient(
    weight, grads, bags, order, weights, divisors, chunk_sums, k, row, first, last, columns, width, chunk, factor, weight_decay,
    has_bags: tl.constexpr, has_order: tl.constexpr, has_weights: tl.constexpr, has_divisors: tl.constexpr,
    has_chunks: tl.constexpr, has_decay: tl.constexpr, dtype: tl.constexpr, block_rows: tl.constexpr,
    block_width: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradient of a row: the sum of its segment, scaled, with what weight decay adds."""
    total = _sum_segment(
        grads, bags, order, weights, chunk_sums, first, last, columns, width, chunk,
        has_bags, has_order, has_weights, has_chunks, dtype, block_rows, block_width,
    )  # fmt: skip
    if has_divisors:
        total = _divide(total, tl.load(divisors + k).to(dtype) + tl.zeros_like(total))
    total = total * _number(factor, dtype)
    if has_decay:
        old = tl.load(weight + row * width + columns, mask=columns < width, other=0.0).to(dtype)
        total = total + _number(weight_decay, dtype) * old
    return total


@triton.jit
def _step(
    weight, state0, state1, row, columns, width, total, scale, rate, eps, part1, beta2, part2,
    rule: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Change some columns of a row. `scale`: what RowwiseAdagrad multiplies the gradient with."""
    ok = columns < width
    at = row * width + columns
    old = tl.load(weight + at, mask=ok, other=0.0).to(dtype)
    if rule == 0:
        change = total * _number(rate, dtype)
    elif rule == 1:
        change = total * scale
    elif rule == 2:
        squares = tl.load(state0 + at, mask=ok, other=0.0) + total * total
        tl.store(state0 + at, squares, mask=ok)
        change = _divide(total, _square_root(squares) + _number(eps, dtype)) * _number(rate, dtype)
    else:
        part = _number(part1, dtype)
        mean = tl.load(state0 + at, mask=ok, other=0.0)
        away = total - mean
        # torch's lerp is exact at both ends
        mean = tl.where(part < 0.5, mean + part * away, total - away * (1.0 - part))
        square = tl.load(state1 + at, mask=ok, other=0.0) * _number(beta2, dtype) + _number(part2, dtype) * total * total
        tl.store(state0 + at, mean, mask=ok)
        tl.store(state1 + at, square, mask=ok)
        change = _divide(mean, _square_root(square) + _number(eps, dtype)) * _number(rate, dtype)
    tl.store(weight + at, (old + change).to(weight.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=_SIZES + _NUMBERS)
def update_kernel(
    weight, state0, state1, rows, grads, bags, order, starts, count, weights, divisors, squares, chunk_sums,
    first_row, last_row, segments, positions, width, chunk,
    factor, weight_decay, rate, eps, row_width, part1, beta2, part2,
    rule: tl.constexpr, has_starts: tl.constexpr, has_count: tl.constexpr, has_bags: tl.constexpr, has_order: tl.constexpr,
    has_weights: tl.constexpr, has_divisors: tl.constexpr, has_squares: tl.constexpr, has_chunks: tl.constexpr,
    has_decay: tl.constexpr, is_single: tl.constexpr, dtype: tl.constexpr, block_rows: tl.constexpr,
    block_width: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each row from rows[first_row] to rows[last_row] and make an optimizer's step with them.

    A program takes one row after the other. `is_single`: all columns fit into a block; otherwise RowwiseAdagrad, which needs
    the squares of the whole row first, sums the gradients twice. `rate` has a minus.
    """
    end = last_row.to(tl.int64)
    if has_count:
        end = tl.minimum(end, tl.load(count).to(tl.int64))
    for k in range(first_row + tl.program_id(0).to(tl.int64), end, tl.num_programs(0)):
        row = tl.load(rows + k).to(tl.int64)
        first = k
        last = k + 1
        if has_starts:
            last = tl.load(starts + k + 1, mask=k + 1 < segments, other=positions)
            first = tl.load(starts + k)
        columns = tl.arange(0, block_width)
        total = _gradient(
            weight, grads, bags, order, weights, divisors, chunk_sums, k, row, first, last, columns, width, chunk, factor,
            weight_decay, has_bags, has_order, has_weights, has_divisors, has_chunks, has_decay, dtype, block_rows, block_width,
        )  # fmt: skip
        scale = tl.full((), 0.0, dtype)
        if rule == 1:
            if has_squares:
                of_row = tl.load(squares + k).to(dtype)
            else:
                of_row = tl.sum(total * total, 0)
                if not is_single:
                    for start in range(block_width, width, block_width):
                        more = _gradient(
                            weight, grads, bags, order, weights, divisors, chunk_sums, k, row, first, last, start + columns,
                            width, chunk, factor, weight_decay, has_bags, has_order, has_weights, has_divisors, has_chunks,
                            has_decay, dtype, block_rows, block_width,
                        )  # fmt: skip
                        of_row += tl.sum(more * more, 0)
            mean_squares = tl.load(state0 + row) + _divide(of_row, _number(row_width, dtype))
            tl.store(state0 + row, mean_squares)
            one = tl.full((), 1.0, dtype)
            scale = _divide(one, _square_root(mean_squares) + _number(eps, dtype)) * _number(rate, dtype)
        _step(weight, state0, state1, row, columns, width, total, scale, rate, eps, part1, beta2, part2, rule, dtype)
        if not is_single:
            for start in range(block_width, width, block_width):
                more = _gradient(
                    weight, grads, bags, order, weights, divisors, chunk_sums, k, row, first, last, start + columns, width,
                    chunk, factor, weight_decay, has_bags, has_order, has_weights, has_divisors, has_chunks, has_decay, dtype,
                    block_rows, block_width,
                )  # fmt: skip
                _step(
                    weight, state0, state1, row, start + columns, width, more, scale, rate, eps, part1, beta2, part2, rule,
                    dtype,
                )  # fmt: skip


@triton.jit
def _begins(ordered, position, n):
    """Whether a number stands at this position for the first time."""
    number = tl.load(ordered + position, mask=position < n, other=0)
    before = tl.load(ordered + position - 1, mask=(position > 0) & (position < n), other=0)
    return number, ((position == 0) | (number != before)) & (position < n)


@triton.jit(do_not_specialize=_SIZES)
def count_unique_kernel(ordered, counts, n, block: tl.constexpr):
    """How many different numbers begin in each block of the sorted ones."""
    number = tl.program_id(0)
    _, begins = _begins(ordered, number.to(tl.int64) * block + tl.arange(0, block), n)
    tl.store(counts + number, tl.sum(begins.to(tl.int32), 0))


@triton.jit(do_not_specialize=_SIZES)
def place_unique_kernel(ordered, counts, unique, starts, count, n, blocks, block: tl.constexpr, block_counts: tl.constexpr):
    """Write each number and where it begins, in order. Behind them, `unique` repeats the last one, and `starts` has n."""
    number = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for start in range(0, blocks, block_counts):
        other = start + tl.arange(0, block_counts)
        found = tl.load(counts + other, mask=other < blocks, other=0).to(tl.int64)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(other < number, found, 0), 0)
    position = number.to(tl.int64) * block + tl.arange(0, block)
    value, begins = _begins(ordered, position, n)
    place = before + tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(unique + place, value, mask=begins)
    tl.store(starts + place, position, mask=begins)
    behind = (position >= total) & (position < n)
    tl.store(unique + position, tl.load(ordered + n - 1), mask=behind)
    tl.store(starts + position, n, mask=behind)
    if number == 0:
        tl.store(count, total)
