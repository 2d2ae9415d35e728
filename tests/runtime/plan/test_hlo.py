"""What is read from a compiled program's text."""

from meshserve.runtime.plan import hlo

# Lines as XLA's CUDA compiler writes them, attributes left out.
PROGRAM = """HloModule jit_shard_step, is_scheduled=true

%slice_computation (param_0: bf16[2,2,1024,512]) -> bf16[1,2,1024,512] {
  %param_0 = bf16[2,2,1024,512]{3,2,1,0} parameter(0)
  ROOT %slice.1 = bf16[1,2,1024,512]{3,2,1,0} slice(%param_0), slice={[1:2], [0:2], [0:1024], [0:512]}
}

%product_computation (param_0: bf16[8,512], param_1: bf16[2,2,1024,512]) -> bf16[8,2048] {
  %param_0.1 = bf16[8,512]{1,0} parameter(0)
  %param_1.1 = bf16[2,2,1024,512]{3,2,1,0} parameter(1)
  %slice.2 = bf16[1,2,1024,512]{3,2,1,0} slice(%param_1.1), slice={[0:1], [0:2], [0:1024], [0:512]}
  %bitcast.1 = bf16[2048,512]{1,0} bitcast(%slice.2)
  ROOT %dot.1 = bf16[8,2048]{1,0} dot(%param_0.1, %bitcast.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%gather_computation (param_0: bf16[4096,512], param_1: s32[8]) -> bf16[8,512] {
  %param_0.2 = bf16[4096,512]{1,0} parameter(0)
  %param_1.2 = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,512]{1,0} gather(%param_0.2, %param_1.2), offset_dims={1}
}

ENTRY %main.1 (weights_0_.1: bf16[4096,512], weights_1_.1: bf16[2,2,1024,512]) -> (bf16[2,9,1,2,16,64], f32[8,4096]) {
  %weights_0_.1 = bf16[4096,512]{1,0} parameter(0), metadata={op_name="weights[0]"}
  %weights_1_.1 = bf16[2,2,1024,512]{3,2,1,0} parameter(1), metadata={op_name="weights[1]"}
  %state_cache.1 = bf16[2,9,1,2,16,64]{5,4,3,2,1,0} parameter(2), metadata={op_name="state.cache"}
  %packed.1 = s32[8]{0} parameter(3), metadata={op_name="packed"}
  %loop_gather_fusion = bf16[8,512]{1,0} fusion(%weights_0_.1, %packed.1), kind=kLoop, calls=%gather_computation
  %gemm_fusion = bf16[8,2048]{1,0} fusion(%loop_gather_fusion, %weights_1_.1), kind=kCustom, calls=%product_computation
  %all-reduce-start.1 = bf16[8,2048]{1,0} all-reduce-start(%gemm_fusion), replica_groups={}
  %all-reduce-done.1 = bf16[8,2048]{1,0} all-reduce-done(%all-reduce-start.1)
  %ffi_call.1 = (bf16[2,9,1,2,16,64]{5,4,3,2,1,0}, u8[64]{0}) custom-call(%state_cache.1), custom_call_target="meshserve_x"
  %get-tuple-element.1 = bf16[2,9,1,2,16,64]{5,4,3,2,1,0} get-tuple-element(%ffi_call.1), index=0
  %bitcast.2 = bf16[4096,512]{1,0} bitcast(%weights_0_.1)
  %custom-call.2 = (f32[8,4096]{1,0}, s8[64]{0}) custom-call(%all-reduce-done.1, %bitcast.2), custom_call_target="__cublas$lt$matmul"
  %get-tuple-element.2 = f32[8,4096]{1,0} get-tuple-element(%custom-call.2), index=0
  ROOT %tuple = (bf16[2,9,1,2,16,64]{5,4,3,2,1,0}, f32[8,4096]{1,0}) tuple(%get-tuple-element.1, %get-tuple-element.2)
}
"""  # noqa: E501
SLICE = "%cut = bf16[1,2,1024,512]{3,2,1,0} fusion(%weights_1_.1), kind=kLoop, calls=%slice_computation"
CONVERTED = "%wide = f32[4096,512]{1,0} convert(%bitcast.2)"
DOUBLED = "%gemm_fusion.remat = bf16[8,2048]{1,0} fusion(%x, %weights_1_.1), kind=kCustom, calls=%product_computation"
# As XLA of jax 0.12 fills an array with zeros again, where it copied it before.
FILLED = "%loop_broadcast_fusion.rematerialized = f32[64,128]{1,0} fusion(), kind=kLoop, calls=%fill_computation"

# As libtpu writes it in a loop's body: queries of 16 heads of 128 cut out of the stack into VMEM.
LOOP = """
%body.1 (arg: (s32[], bf16[28,1024,16,128])) -> (s32[], bf16[28,1024,16,128]) {
  %layer.1 = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %stack.1 = bf16[28,1024,16,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %constant_dynamic-slice_fusion.2 = bf16[1,1024,16,128]{3,2,1,0:T(8,128)(2,1)S(1)} fusion(%stack.1, %layer.1)
  %scale_dynamic-slice_fusion.4 = bf16[1024]{0:T(1024)(128)(2,1)} fusion(%stack.1, %layer.1)
}
"""


def with_line(line: str) -> str:
    """The program with one instruction more at its end."""
    return PROGRAM.replace("  ROOT %tuple", f"  {line}\n  ROOT %tuple")


def test_a_program_that_reads_its_weights_where_they_lie():
    found = hlo.read(PROGRAM)
    assert (found.num_kernels, found.num_all_reduces, found.num_recomputed) == (1, 1, 0)
    assert found.num_launches == 5  # gather, product, sum, our kernel, the library's product
    assert (found.weight_copies, found.weight_copy_bytes) == ((), 0)


def test_a_layer_cut_out_of_the_stack_is_a_copy():
    found = hlo.read(with_line(SLICE))
    assert found.weight_copies == ("bf16[1,2,1024,512]{3,2,1,0} cut",)
    assert found.weight_copy_bytes == 2 * 2 * 1024 * 512


def test_a_table_in_another_type_is_a_copy_also_under_another_name():
    found = hlo.read(with_line(CONVERTED))
    assert found.weight_copies == ("f32[4096,512]{1,0} wide",)
    assert found.weight_copy_bytes == 4 * 4096 * 512


def test_products_that_are_computed_twice_are_counted():
    assert hlo.read(with_line(DOUBLED)).num_recomputed == 1


def test_zeros_that_are_filled_in_twice_are_not():
    assert hlo.read(with_line(FILLED)).num_recomputed == 0


def test_what_a_loop_cuts_out_is_told_by_its_size():
    assert hlo.num_slices(LOOP, {16 * 128 * 1024, 3072 * 1024}) == 1
    assert hlo.num_slices(LOOP, {3072 * 1024}) == 0
