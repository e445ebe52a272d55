"""The faults that are planted: in which text, what is replaced, and by what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    name: str
    old: str
    new: str

    def plant(self, text: str) -> str:
        """`text` with the fault. Raises ValueError unless there is exactly one place for it."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name!r} has {text.count(self.old)} places in {self.file}, not one: "
                f"{self.old!r}"
            )
        return text.replace(self.old, self.new)


DECODE = (
    # Lengths, blocks, splits.
    ("length one too many", "min(len, split_begin", "min(len + 1, split_begin"),
    ("length one too few", "min(len, split_begin", "min(len - 1, split_begin"),
    ("another sequence's length", "context_lens[seq]", "context_lens[0]"),
    ("last token of a slice read twice", "valid[j] = token < end", "valid[j] = token <= end"),
    ("block off by one", "table[token / BLOCK]", "table[(token + 1) / BLOCK]"),
    ("slot off by one", "slot = token % BLOCK", "slot = (token + 1) % BLOCK"),
    ("split begins a token late", "split_begin = split * split_tokens", "split_begin = split * split_tokens + 1"),
    ("splits overlap", "split_begin = split * split_tokens", "split_begin = split * (split_tokens - 1)"),
    ("split of one token skipped", "if (split_begin >= len)", "if (split_begin + 1 >= len)"),
    ("slices leave tokens over", "slice_tiles = (split_end - split_begin + SLICES * TILE - 1)", "slice_tiles = (split_end - split_begin)"),
    ("slices overlap", "begin = split_begin + slice * slice_tiles * TILE", "begin = split_begin + slice * slice_tiles"),
    ("tiles overlap", "tile += TILE", "tile += ROWS"),
    ("tiles leave gaps", "token = tile + j * ROWS + row", "token = tile + j * TILE + row"),
    ("table row of the next sequence", "block_tables + seq * block", "block_tables + (seq + 1) * block"),
    ("table row without its stride", "seq * block_tables_strides[0]", "seq"),
    # Heads, rows, lanes.
    ("wrong KV head", "kv_head = threadgroup_position_in_grid.x / HEAD_SPLITS", "kv_head = threadgroup_position_in_grid.x % HEAD_SPLITS"),
    ("query head of another group", "head = kv_head * GROUP + min", "head = kv_head * HEADS + min"),
    ("query head past the group", "min(first_head + h, GROUP - 1)", "(first_head + h)"),
    ("output head past the group", "group_head >= GROUP", "group_head > GROUP"),
    ("heads not offset by head group", "first_head = team_head + head_group * HEADS", "first_head = team_head"),
    ("heads not offset by head split", "team_head = (threadgroup_position_in_grid.x % HEAD_SPLITS) * TEAM", "team_head = 0"),
    ("head groups and slices mixed up", "slice = simdgroup_index_in_threadgroup / HEAD_GROUPS", "slice = simdgroup_index_in_threadgroup / SLICES"),
    ("query strides swapped", "seq * queries_strides[0] + head * queries_strides[1]", "seq * queries_strides[1] + head * queries_strides[0]"),
    ("sequence from the wrong axis", "seq = threadgroup_position_in_grid.y", "seq = threadgroup_position_in_grid.z"),
    ("split from the wrong axis", "split = threadgroup_position_in_grid.z", "split = threadgroup_position_in_grid.y"),
    ("wrong lane of the row", "row_lane = lane % LANES", "row_lane = (lane + 1) % LANES + lane / LANES"),
    ("wrong row of the tile", "row = lane / LANES", "row = lane % ROWS"),
    ("rows at once miscounted", "ROWS = 32 / LANES", "ROWS = 16 / LANES"),
    ("row's last vectors left out", "(ROW_VECS + LANES - 1) / LANES", "ROW_VECS / LANES"),
    ("idle lanes read the next row", "valid[j] && i < ROW_VECS", "valid[j]"),
    ("rows past the end read", "inside = valid[j] && i", "inside = i"),
    ("table read past the end", "valid[j] ? table[token / BLOCK] : 0", "table[token / BLOCK]"),
    # The softmax.
    ("values from the key pool", "(value_pool + at)", "(key_pool + at)"),
    ("keys from the value pool", "(key_pool + at)", "(value_pool + at)"),
    ("scale without log2(e)", "scale * M_LOG2E_F", "scale"),
    ("unscaled scores", "(products) * to_log2", "(products)"),
    ("base e for base 2", "valid[j] ? fast::exp2(", "valid[j] ? fast::exp("),
    ("missing tokens in the maximum", "top = valid[j] ? max(top, score[j]) : top", "top = max(top, score[j])"),
    ("missing tokens in the sum", "weight = valid[j] ? fast::exp2(score[j] - m[h]) : 0", "weight = fast::exp2(score[j] - m[h])"),
    ("sum not rescaled", "l[h] *= fade;", ""),
    ("output not rescaled", "o[h][c] *= fade;", ""),
    ("maximum not kept", "m[h] = top;\n            l[h] *=", "l[h] *="),
    ("rescaled for a smaller maximum", "if (top > m[h])", "if (top < m[h])"),
    ("maximum starts at 0", "m[h] = LOWEST", "m[h] = 0"),
    ("sum not initialised", "    l[h] = 0;\n", ""),
    ("output not initialised", "        o[h][c] = Accum(0);\n", ""),
    ("one row's dot product summed in 16 bits", "float products = 0", "T products = 0"),
    # Merging.
    ("rows of a SIMD group not all merged", "step < 32; step *= 2", "step < 16; step *= 2"),
    ("other rows' sum dropped", "l[h] * mine + other_l * theirs", "l[h] * mine"),
    ("other rows' output dropped", " + simd_shuffle_xor(o[h][c], ushort(step)) * theirs", ""),
    ("other rows weighed as one's own", "theirs = fast::exp2(other_m - top)", "theirs = mine"),
    ("last slice dropped from the output", "for (int s = 0; s < SLICES; s++) {\n            const", "for (int s = 0; s < SLICES - 1; s++) {\n            const"),
    ("slices not weighed", "mixed += weight * slice_o", "mixed += slice_o"),
    ("slice sums not weighed", "sum += weight * slice_l", "sum += slice_l"),
    ("slices' layout transposed", "simdgroup = s * HEAD_GROUPS + g", "simdgroup = g * SLICES + s"),
    ("division by the sum left out", "mixed / sum : Accum(0)", "mixed : Accum(0)"),
    ("empty sequence divided by 0", "len > 0 ? mixed / sum : Accum(0)", "mixed / sum"),
    ("partial results of all splits in one place", "head * threadgroups_per_grid.z + split", "head * threadgroups_per_grid.z"),
    ("first head group's sums alone written", "if (i % ROW_VECS == 0)", "if (i == 0)"),
    # Threads and memory.
    ("no barrier before slices are read", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for", "    for"),
    ("no barrier before slices are overwritten", "    threadgroup_barrier(mem_flags::mem_threadgroup);  // before", "    // before"),
    ("barrier that orders nothing", "threadgroup_barrier(mem_flags::mem_threadgroup);\n    for", "threadgroup_barrier(mem_flags::mem_none);\n    for"),
    ("barrier in one SIMD group", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for", "    if (slice == 0) {\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n    }\n    for"),
    ("slices in each thread's own memory", "threadgroup Accum slice_o", "Accum slice_o"),
    ("collective under divergence", "score[j] = sum_over_lanes<LANES>(products) * to_log2;", "score[j] = 0;\n            if (valid[j]) {\n                score[j] = sum_over_lanes<LANES>(products) * to_log2;\n            }"),
    ("device pointer to a small table", "const auto table", "const device int* table"),
    ("pointer without an address space", "const device Stored* key =", "const Stored* key ="),
    ("device cast left out", "(const device Stored*)(value_pool", "(const Stored*)(value_pool"),
    ("double", "float sum = 0", "double sum = 0"),
    ("threadgroup memory too large", "slice_o[SIMDGROUPS * ROW_VECS]", "slice_o[SIMDGROUPS * ROW_VECS * 64]"),
)  # fmt: skip

SOFTMAX = (
    ("splits double a token early", "len > tokens * ENOUGH", "len >= tokens * ENOUGH"),
    ("splits double once too often", "tokens < LARGEST", "tokens <= LARGEST"),
    ("neighbouring lanes not summed", "step > 0; step /= 2", "step > 1; step /= 2"),
    ("lanes of another row summed", "int step = LANES / 2", "int step = LANES"),
    ("lanes shifted instead of exchanged", "simd_shuffle_xor(x", "simd_shuffle_down(x"),
)  # fmt: skip

PAGING = (
    ("32-bit offsets", "int64_t(block) * KV_HEADS + kv_head", "block * KV_HEADS + kv_head"),
    ("slot past the block", "* BLOCK + slot) * D", "* BLOCK + slot + 1) * D"),
    ("KV heads left out of the stride", "int64_t(block) * KV_HEADS", "int64_t(block)"),
    ("slots before heads", "((int64_t(block) * KV_HEADS + kv_head) * BLOCK + slot)", "((int64_t(block) * BLOCK + slot) * KV_HEADS + kv_head)"),
)  # fmt: skip

MERGE = (
    ("last split dropped", "splits = (len + split_tokens - 1) / split_tokens", "splits = len / split_tokens"),
    ("a split too many", "splits = (len + split_tokens - 1) / split_tokens", "splits = len / split_tokens + 1"),
    ("rows of partial results overlap", "row * partial_out_shape[2]", "row * splits"),
    ("maximum of one lane", "top = simd_max(top);", ""),
    ("splits not weighed", "mixed += weight * ", "mixed += "),
    ("split sums not weighed", "sum += weight * ", "sum += "),
    ("sum and maximum swapped", "partial_stats[(first + s) * 2 + 1]", "partial_stats[(first + s) * 2]"),
    ("row's end left out", "i < D / 4; i += 32", "i < D / 4 - 1; i += 32"),
    ("query heads of another sequence", "int64_t(seq) * QUERY_HEADS + head", "int64_t(head) * QUERY_HEADS + seq"),
    ("empty sequence divided by 0", "len > 0 ? mixed / sum : float4(0)", "mixed / sum"),
)  # fmt: skip

COPY = (
    ("copy past a sequence's end", "token < context_lens[seq]", "token <= context_lens[seq]"),
    ("copied keys for values", "(value_pool + from)", "(key_pool + from)"),
    ("copy past the last token", "if (token >= TOKENS)", "if (token > TOKENS)"),
)  # fmt: skip

MUTANTS = tuple(
    Mutant(file, name, old, new)
    for file, mutants in (
        ("decode.metal", DECODE),
        ("softmax.metal", SOFTMAX),
        ("paging.metal", PAGING),
        ("merge.metal", MERGE),
        ("copy.metal", COPY),
    )
    for name, old, new in mutants
)
