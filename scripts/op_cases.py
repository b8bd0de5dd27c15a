"""Every op of `kernels/` on workloads of real models.

One list for all who ask what an op does at a real size: `aot` compiles the launches that these
calls make, `roofline` takes its floors from the formulae, `gpu_check` holds the op against its
definition and times it. `op_calls` says what the formulae count.
"""

from __future__ import annotations

from ..kernels.accept_block import accept_block, accept_block_reference
from ..kernels.accept_chains import accept_chains, accept_chains_reference
from ..kernels.accept_tree import accept_trees
from ..kernels.accept_typical import accept_typical, accept_typical_reference
from ..kernels.add_norm import add_norm, add_norm_reference
from ..kernels.distill_chunk import distill_chunk, distill_chunk_reference
from ..kernels.kv_append import kv_append, kv_append_reference
from ..kernels.kv_move import (
    compact_paths,
    compact_paths_reference,
    copy_pages,
    copy_pages_reference,
)
from ..kernels.norm_concat import norm_concat, norm_concat_reference
from ..kernels.paged_attention import paged_attention, paged_attention_reference
from ..kernels.place_rows import place_rows, place_rows_reference
from ..kernels.renormalise import renormalise, renormalise_reference
from ..kernels.rms_norm import rms_norm, rms_norm_reference
from ..kernels.shift import shift_insert, shift_insert_reference
from ..kernels.tree_build import build_trees, build_trees_reference, rerank, rerank_reference
from ..kernels.tree_walk import accept_trees_reference
from ..kernels.ttt_attention import ttt_attention, ttt_attention_dense
from . import op_arguments as given
from .op_arguments import CAPPED, LATENTS, SIZES
from .op_calls import (
    Case,
    chunk,
    graded,
    in_place,
    normed,
    of_pool,
    one,
    over_pages,
    tables,
    unroll,
    wide,
)

_ROWS = {"N": 4096}
_BATCH = {"B": 64, "K": 3}
_FEW = {"N": 5}
_SOME = {"B": 3, "L": 70}
_POOLS = (*SIZES, *LATENTS)


def _attention(name: str, text: str, numbers: dict[str, int], check: dict[str, int]) -> Case:
    """Rows over pages; L keys are read by each sequence's R rows."""
    tree = "T" in numbers
    return Case(
        f"paged_attention, {name}",
        text,
        numbers,
        "2*B*(L*G*W + R*Q*(D+E))" + ("+4*B*R*R" if tree else ""),
        "2*B*R*L*Q*(D+E)",
        given.paged_arguments,
        over_pages(paged_attention),
        wide(over_pages(paged_attention_reference)),
        check,
        matrix=True,
        sizes=_POOLS,
        extra=(CAPPED,),
    )


CASES: tuple[Case, ...] = (
    Case(
        "rms_norm",
        "N={N} rows",
        {"N": 256},
        "4*N*H",
        "5*N*H",
        given.states(1, 1),
        one(normed(rms_norm)),
        wide(normed(rms_norm_reference)),
        _FEW,
    ),
    Case(
        "rms_norm, with gradients",
        "N={N} rows",
        _ROWS,
        "10*N*H",
        "17*N*H",
        given.states(1, 1),
        graded(normed(rms_norm)),
        wide(graded(normed(rms_norm_reference))),
        _FEW,
    ),
    Case(
        "norm_concat",
        "N={N} rows",
        {"N": 256},
        "8*N*H",
        "10*N*H",
        given.states(2, 2),
        one(normed(norm_concat)),
        wide(normed(norm_concat_reference)),
        _FEW,
    ),
    Case(
        "norm_concat, with gradients",
        "N={N} rows",
        _ROWS,
        "20*N*H",
        "34*N*H",
        given.states(2, 2),
        graded(normed(norm_concat)),
        wide(graded(normed(norm_concat_reference))),
        _FEW,
    ),
    Case(
        "add_norm",
        "N={N} rows",
        {"N": 256},
        "8*N*H",
        "6*N*H",
        given.states(2, 1),
        normed(add_norm),
        wide(normed(add_norm_reference)),
        _FEW,
    ),
    Case(
        "add_norm, with gradients",
        "N={N} rows",
        _ROWS,
        "16*N*H",
        "19*N*H",
        given.states(2, 1),
        graded(normed(add_norm)),
        wide(graded(normed(add_norm_reference))),
        _FEW,
    ),
    Case(
        "shift_insert",
        "B={B}, R={R} rows each",
        {"B": 64, "R": 4},
        "16*B*R",
        "2*B*R",
        given.shift_arguments,
        one(shift_insert),
        one(shift_insert_reference),
        sizes=SIZES[:1],
    ),
    Case(
        "place_rows",
        "B={B}, R={R} rows each",
        {"B": 64, "R": 4},
        "20*B*R",
        "4*B*R",
        given.place_arguments,
        place_rows,
        place_rows_reference,
        sizes=SIZES[:1],
    ),
    Case(
        "kv_append",
        "N={N} rows",
        {"N": 256},
        "4*N*G*W",
        "0",
        given.append_arguments,
        in_place(kv_append),
        in_place(kv_append_reference),
        _FEW,
        sizes=_POOLS,
    ),
    Case(
        "copy_pages",
        "P={P} pages of 16",
        {"P": 8},
        "4*P*16*G*W",
        "0",
        given.copy_arguments,
        of_pool(copy_pages),
        of_pool(copy_pages_reference),
        {"P": 2},
        sizes=_POOLS,
    ),
    Case(
        "compact_paths",
        "B={B}, K={K} rows each",
        _BATCH,
        "4*B*K*G*W",
        "0",
        given.path_arguments,
        of_pool(lambda pool, *rest: compact_paths([pool], *rest)),
        of_pool(compact_paths_reference),
        {"B": 4},
        sizes=_POOLS,
    ),
    _attention("decode", "B={B}, L={L} keys", {"B": 64, "R": 1, "L": 4096}, {"B": 3, "L": 1100}),
    _attention("decode, short", "B={B}, L={L} keys", {"B": 64, "R": 1, "L": 1024}, _SOME),
    _attention("verify", "B={B}, R={R} rows each, L={L} keys", {"B": 64, "R": 4, "L": 4096}, _SOME),
    _attention(
        "tree",
        "B={B}, trees of R={R} rows, L={L} keys",
        {"B": 64, "R": 60, "L": 4096, "T": 1},
        {"B": 2, "R": 21, "L": 70},
    ),
    Case(
        "paged_attention, prompt",
        "R={R} rows, all keys their own",
        {"B": 1, "R": 2048, "L": 2048},
        "2*R*(G*W+Q*(D+E))",
        "R*R*Q*(D+E)",
        given.paged_arguments,
        over_pages(paged_attention),
        wide(over_pages(paged_attention_reference)),
        {"R": 70, "L": 70},
        matrix=True,
        sizes=_POOLS,
        extra=(CAPPED,),
    ),
    Case(
        "build_trees",
        "B={B} trees of C={C}",
        {"B": 64, "C": 60},
        "B*C*(24+4*C)",
        "4*B*C*C",
        given.forest_arguments,
        tables(build_trees),
        tables(build_trees_reference),
        {"B": 2},
        sizes=SIZES[:1],
    ),
    Case(
        "rerank",
        "B={B} trees of C={C}, {keep} kept",
        {"B": 64, "C": 510, "keep": 59},
        "B*(12*C+16*keep)",
        "3*B*C*C",
        given.score_arguments,
        rerank,
        rerank_reference,
        {"B": 2},
        sizes=SIZES[:1],
    ),
    Case(
        "accept_chains",
        "B={B}, K={K}, float32",
        _BATCH,
        "8*B*V",
        "4*B*V",
        given.chain_arguments,
        accept_chains,
        accept_chains_reference,
        {"B": 8},
    ),
    Case(
        "accept_chains, reduced",
        "B={B}, K={K}, float32, {Vd} draft ids",
        _BATCH | {"Vd": 32000},
        "4*B*(3*V+Vd)",
        "4*B*V",
        given.chain_arguments,
        accept_chains,
        accept_chains_reference,
        {"B": 8},
    ),
    Case(
        "accept_block",
        "B={B}, K={K}, float32",
        _BATCH,
        "4*B*V*(2*K+1)",
        "6*B*K*V",
        given.block_arguments,
        accept_block,
        accept_block_reference,
        {"B": 8},
    ),
    Case(
        "accept_block, reduced",
        "B={B}, K={K}, float32, {Vd} draft ids",
        _BATCH | {"Vd": 32000},
        "4*B*(V*(K+3)+K*Vd)",
        "6*B*K*V",
        given.block_arguments,
        accept_block,
        accept_block_reference,
        {"B": 8},
    ),
    Case(
        "accept_typical",
        "B={B}, K={K}, float32",
        _BATCH,
        "4*B*V*(K+1)",
        "4*B*K*V",
        given.typical_arguments,
        accept_typical,
        accept_typical_reference,
        {"B": 8},
    ),
    Case(
        "accept_trees",
        "B={B} trees of C={C}, float32",
        {"B": 64, "C": 60},
        "8*B*V",
        "4*B*V",
        given.tree_arguments,
        accept_trees,
        accept_trees_reference,
        {"B": 4, "C": 9},
    ),
    Case(
        "accept_trees, reduced",
        "B={B} trees of C={C}, float32, {Vd} draft ids",
        {"B": 64, "C": 60, "Vd": 32000},
        "4*B*(3*V+Vd)",
        "4*B*V",
        given.tree_arguments,
        accept_trees,
        accept_trees_reference,
        {"B": 4, "C": 9},
    ),
    Case(
        "renormalise",
        "B={B} rows, float32",
        {"B": 64},
        "8*B*V",
        "10*B*V",
        given.sampler_arguments,
        one(renormalise),
        wide(renormalise_reference),
        {"B": 7},
    ),
    Case(
        "distill_chunk",
        "M={M} students, T={T} teachers",
        {"M": 512, "T": 256},
        "2*V*(2*M+T)",
        "30*M*V",
        given.chunk_arguments,
        chunk(distill_chunk),
        wide(chunk(distill_chunk_reference)),
        {"M": 5, "T": 3},
        extra=(CAPPED,),
    ),
    Case(
        "ttt_attention",
        "N={N} tokens, two documents",
        _ROWS,
        "2*N*(G+Q)*(D+E)",
        "5*N*N*Q*(D+E)//9",
        given.unroll_arguments,
        unroll(ttt_attention, one),
        wide(unroll(ttt_attention_dense, one)),
        {"N": 130},
        matrix=True,
        extra=(CAPPED,),
    ),
    Case(
        "ttt_attention, with gradients",
        "N={N} tokens, two documents",
        _ROWS,
        "6*N*(G+Q)*(D+E)",
        "5*N*N*Q*(4*D+3*E)//9",
        given.unroll_arguments,
        unroll(ttt_attention, graded),
        wide(unroll(ttt_attention_dense, graded)),
        {"N": 130},
        matrix=True,
        extra=(CAPPED,),
    ),
)
