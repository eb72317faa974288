"""Which tests show what the last column of docs/ascend.md's table "What was proven, and how" says;
test_evidence.py holds the two together.

By the row's first column, for every part of its last one (semicolons separate them): a file below
tests/ and names of tests in it. Nothing for a part that says what was not done.
"""

Tests = tuple[str, ...]

BOUNDS = ("ascend/test_rule_bounds.py test_inside test_outside",)
NOT_DONE: Tests = ()
LATENT, R1 = "ascend/test_latent_attention.py", "ascend/test_r1_attention.py"
EXECUTOR = "ascend/test_executor.py test_the_double_is_exact"
R1_EXACT = f"{R1} test_the_double_is_exact test_as_far_from_float32_as_the_reference"
CALLS, TO_THE_BIT, SCHEMAS = (
    "ascend/test_torch_npu.py",
    "ascend/test_to_the_bit.py",
    "ascend/schemas/test_schemas.py",
)
KERNELS, STRICT, MUTANTS = (
    "ascend/lowered/test_kernels.py",
    "ascend/lowered/test_strict.py",
    "ascend/lowered/test_mutants.py",
)
FACTS, OPERANDS, FEW = (
    "ascend/lowered/test_ir_facts.py",
    "ascend/lowered/test_exact_operands.py",
    "ascend/lowered/test_few_tokens_ir.py",
)
LAUNCHES = "ascend/test_launches.py test_launches_of_a_step"
SHARED_MUTANTS = f"{MUTANTS} test_a_mutant_fails test_the_kernel_passes"
EVERY_CODE = (
    f"{STRICT} test_every_code_of_fp4_rows_and_blocks",
    f"{KERNELS} test_fp4_tiles_are_exact_for_every_code_and_scale",
)
ROWS = (
    f"{KERNELS} test_decode_shapes",
    f"{STRICT} test_rows test_linear test_offsets_past_two_gib",
    SHARED_MUTANTS,
    f"{FACTS} test_inner_loop",
)
BLOCKS = (
    f"{KERNELS} test_decode_shapes test_prefill_blocks test_experts",
    f"{STRICT} test_blocks test_linear test_experts_in_fresh_memory test_offsets_past_two_gib",
    SHARED_MUTANTS,
    f"{FACTS} test_inner_loop test_cube_tiles_are_the_budgeted_ones",
)

EVIDENCE: dict[str, tuple[Tests, ...]] = {
    "W4A16 linear, groups of 32, 64, 128, zero points": (
        BOUNDS,
        (f"{SCHEMAS} test_dense_products",),
        (
            f"{CALLS} test_linear test_offset_is_added test_few_rows_split_into_digits",
            f"{TO_THE_BIT} test_linear",
            EXECUTOR,
            R1_EXACT,
        ),
    ),
    "W4A16 experts": (
        BOUNDS,
        (f"{SCHEMAS} test_experts_of_one_layer",),
        (f"{CALLS} test_experts", f"{TO_THE_BIT} test_experts", EXECUTOR, R1_EXACT),
    ),
    "INT8 A8W8 linear": (
        BOUNDS,
        (f"{SCHEMAS} test_dense_products test_the_doubles_schemas_are_torch_npus",),
        (
            f"{CALLS} test_linear",
            f"{TO_THE_BIT} test_linear",
            "ascend/test_what_operators_get.py test_layouts_at_rest "
            "test_the_double_refuses_a_layout",
            EXECUTOR,
        ),
    ),
    "INT8 A8W8 experts": (
        BOUNDS,
        (f"{SCHEMAS} test_experts_of_one_layer",),
        (f"{CALLS} test_experts", f"{TO_THE_BIT} test_experts", EXECUTOR),
    ),
    "W4A8 experts (int4-w4a8), half a byte a code": (
        BOUNDS,
        (f"{SCHEMAS} test_experts_of_one_layer",),
        (
            f"{CALLS} test_experts test_experts_in_half_a_byte_a_code",
            f"{TO_THE_BIT} test_experts",
            EXECUTOR,
        ),
    ),
    "FP4 linear and experts": (
        (f"{CALLS} test_linear test_experts", EXECUTOR),
        (f"{CALLS} test_fp4_decodes_exactly",),
    ),
    "routing": (
        BOUNDS,
        (f"{SCHEMAS} test_norms_and_routing",),
        (f"{CALLS} test_route", f"{TO_THE_BIT} test_gate", EXECUTOR),
    ),
    "RMSNorm, with and without residual": (
        BOUNDS,
        (f"{SCHEMAS} test_norms_and_routing",),
        (
            f"{CALLS} test_norms_and_activation",
            "ascend/test_what_operators_get.py test_epsilons_of_norms",
            EXECUTOR,
        ),
    ),
    "SiLU and product": (
        BOUNDS,
        (f"{SCHEMAS} test_experts_of_one_layer",),
        (
            f"{CALLS} test_norms_and_activation",
            f"{TO_THE_BIT} test_activation_and_rotation",
            EXECUTOR,
        ),
    ),
    "latent attention, decode, absorbed": (
        BOUNDS,
        (f"{SCHEMAS} test_latent_attention",),
        (f"{LATENT} test_mla_decode test_mla_decode_of_other_sizes", EXECUTOR, R1_EXACT),
    ),
    "latent normed, rotary key rotated, both caches written": (
        BOUNDS,
        (f"{SCHEMAS} test_rotation_and_cache",),
        (f"{LATENT} test_mla_prepare test_mla_prepare_of_other_sizes", R1_EXACT),
    ),
    "rotary part of the query, decode": (
        BOUNDS,
        (f"{SCHEMAS} test_rotation_and_cache",),
        (f"{LATENT} test_mla_decode", R1_EXACT),
    ),
    "rotary embedding": (
        BOUNDS,
        (f"{SCHEMAS} test_rotary",),
        (f"{CALLS} test_rope", f"{TO_THE_BIT} test_activation_and_rotation", EXECUTOR),
    ),
    "unquantized linears, head, router": (
        (EXECUTOR, "ascend/test_executor.py test_an_fp8_checkpoint"),
    ),
    "absorbed W_UK and W_UV": (
        BOUNDS,
        (f"{SCHEMAS} test_products_of_heads",),
        (f"{LATENT} test_mla_decode test_mla_decode_of_other_sizes", R1_EXACT),
    ),
    "unquantized experts": (
        BOUNDS,
        (f"{SCHEMAS} test_experts_of_one_layer",),
        (f"{CALLS} test_experts", f"{TO_THE_BIT} test_experts", EXECUTOR),
    ),
    "grouped-query attention, decode": (
        BOUNDS,
        (f"{SCHEMAS} test_grouped_attention",),
        (
            "ascend/test_grouped_attention.py test_gqa_decode test_gqa_prefill "
            "test_what_the_operator_does_not_take",
        ),
    ),
    "MLA up to attention in one launch, INT8 or unquantized, bf16; 4-bit models by `--preset "
    "int8-attention`": (
        BOUNDS,
        (f"{SCHEMAS} test_mla_prolog",),
        (
            f"{LATENT} test_mla_prolog_is_the_chain_it_replaces",
            f"{TO_THE_BIT} test_prolog",
            R1_EXACT,
        ),
        (f"{R1} test_every_way_to_run",),
    ),
    "decode step as a graph": (
        (
            "ascend/test_capture.py test_a_captured_step_gives_the_eager_tokens",
            f"{R1} test_every_way_to_run",
        ),
        ("ascend/test_capture.py test_what_waits_for_a_value_is_launched_one_by_one",),
        (
            "ascend/test_capture.py test_a_capture_that_prefetching_ends_is_tried_without "
            "test_both_reasons_are_told",
        ),
        (f"{SCHEMAS} test_graphs_are_told_lengths",),
    ),
    "next weights into the L2 during a collective": (
        (
            "ascend/test_prefetch.py test_the_next_weights_are_asked_for "
            "test_what_holds_too_much_is_not_asked_for",
            "ascend/test_what_operators_get.py test_prefetch_asks_for_every_byte",
            f"{TO_THE_BIT} test_what_is_held_is_all_that_is_computed_with "
            "test_every_byte_of_a_large_tensor_is_asked_for",
        ),
    ),
    "cache sized after a prompt was computed": (
        (
            "ascend/test_memory_budget.py test_a_prompt_is_computed_before_memory_is_asked_for "
            "test_the_prompt_goes_through_every_operator",
        ),
        NOT_DONE,
    ),
    "`make acceptance-npu`": (
        ("ascend/test_acceptance.py test_the_whole_day",),
        ("ascend/test_acceptance.py test_the_whole_day",),
    ),
    "ranks": (
        (f"{R1} test_two_ranks",),
        (
            "ascend/test_hccl.py test_a_rank_takes_its_card_and_meets_over_hccl",
            f"{SCHEMAS} test_ranks_meet_over_hccl",
        ),
        NOT_DONE,
    ),
    "prompts added in 8 bits, `--collectives int8`": (
        (
            "ascend/test_hccl.py test_prompts_are_added_in_8_bits",
            "executor/test_coded_sums.py test_the_sum_is_within_its_bound",
        ),
        NOT_DONE,
    ),
    "`quantkit kernels --check`": (
        ("ascend/test_check.py test_every_operator_is_run_and_right",),
        (
            "ascend/test_check.py test_versions_stand_beside_the_results",
            "ascend/test_machine.py test_versions test_what_stands_beside_a_time",
        ),
    ),
    "W4A16 linear, 1 or 2 tokens": (ROWS, (f"{OPERANDS} test_rows",)),
    "W4A16, more tokens, linears and experts": (BLOCKS, (f"{OPERANDS} test_blocks",)),
    "FP4 W4A16 linear, 1 or 2 tokens": (ROWS, (f"{OPERANDS} test_rows",), EVERY_CODE),
    "FP4 W4A16, more tokens": (BLOCKS, (f"{OPERANDS} test_blocks",), EVERY_CODE),
    "INT8 A8W8, linears and, of more than 4 tokens, experts": (
        BLOCKS,
        (f"{KERNELS} test_int8_is_exact_before_the_last_rounding", f"{OPERANDS} test_blocks"),
    ),
    "experts of up to 4 tokens, int4, FP4 and INT8, in two launches": (
        (
            f"{FEW} test_experts test_what_is_not_theirs_stays test_offsets_past_two_gib "
            "test_inner_loops test_the_canary_is_seen",
            f"{FEW} test_one_expert_of_one_token_to_the_rounding",
            f"{KERNELS} test_r1_experts_of_one_rank",
        ),
        (f"{OPERANDS} test_gate_up test_down",),
        ("ascend/test_few_tokens.py test_experts_of_few_tokens_are_two_launches", LAUNCHES),
    ),
    "router's product of up to 4 tokens; the shared experts' columns": (
        (
            f"{FEW} test_router test_join test_the_router_fits test_join_is_vector_code "
            "test_the_canary_is_seen",
        ),
        ("ascend/test_few_tokens.py test_gate test_gate_of_a_part_and_of_nothing",),
    ),
    "attention's rescaling by integer addition (AMLA)": (
        (
            "ascend/test_amla.py test_the_error_stays_within_its_bound "
            "test_addition_to_the_exponent_is_multiplication",
        ),
        ("ascend/test_amla.py test_a_model_whose_attention_rescales_by_addition",),
        NOT_DONE,
    ),
    "rows of experts in blocks for the cube, more than 4 tokens": (
        (f"{STRICT} test_assign",),
        ("ascend/test_few_tokens.py test_experts_of_few_tokens_are_two_launches", LAUNCHES),
    ),
    "FP4 experts, where built": (
        (
            "ascend/test_fp4_gemv.py test_the_kernel_gives_the_twins_bits "
            "test_offsets_past_four_gib",
            "ascend/test_ascendc_rules.py test_a_rule",
        ),
        ("ascend/test_streamed.py test_fp4_is_packed_as_its_twin_does_it",),
        ("ascend/test_streamed.py test_experts",),
        ("ascend/test_fp4_gemv.py test_what_bounds_it",),
        NOT_DONE,
    ),
    "int4 experts, where built: vector cores decode for the cube": (
        (
            "ascend/test_int4_grouped.py test_the_kernel_gives_the_twins_bits "
            "test_offsets_past_eight_gib",
            "ascend/test_ascendc_rules.py test_a_rule test_what_is_sent_arrives_late",
        ),
        ("ascend/test_streamed.py test_int4_is_packed_as_its_twin_does_it test_experts",),
        ("ascend/test_launches.py test_decoding_on_the_doubles_of_kernels",),
        ("ascend/test_int4_grouped.py test_what_bounds_it",),
        NOT_DONE,
    ),
    "both as operators of torch": (
        (
            "ascend/lowered/test_binding.py test_experts_by_the_binding "
            "test_what_the_binding_refuses test_parts_of_k",
        ),
        NOT_DONE,
    ),
}
