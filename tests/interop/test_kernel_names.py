"""Names of kernels as libraries write them, and PyTorch's descriptions of collectives."""

import pytest

from clustersim.common.dtypes import COMPUTE_DTYPES, DType
from clustersim.interop.kernel_names import classify_kernel, make_span_label
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape
from clustersim.report.export.kineto_kernels import to_kineto_kernel
from clustersim.results.profiled_step import GpuSpanKind
from tests.interop.synthetic_profiles import ALL_REDUCE_ARGS

KERNEL_NAMES = {  # from traces of A100, H100, H200, MI250 and V100
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT": GpuSpanKind.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel":
        GpuSpanKind.MATMUL,
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(Params)": GpuSpanKind.MATMUL,
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn": GpuSpanKind.MATMUL,
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN": GpuSpanKind.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": GpuSpanKind.MATMUL,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>":
        GpuSpanKind.ATTENTION,
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>": GpuSpanKind.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": GpuSpanKind.ATTENTION,
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Traits>": GpuSpanKind.NORM,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": GpuSpanKind.NORM,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": GpuSpanKind.POINTWISE,
    "triton_poi_fused__to_copy_mul_silu_3": GpuSpanKind.POINTWISE,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": GpuSpanKind.POINTWISE,
    "void at::native::elementwise_kernel<128, 2, direct_copy_kernel_cuda(at::TensorIteratorBase&)>": GpuSpanKind.COPIES,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>":
        GpuSpanKind.OPTIMIZER,
    "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<neg_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda()#2}::operator()() const::{lambda(float)#1}>>": GpuSpanKind.POINTWISE,
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>":
        GpuSpanKind.COPIES,
    "void lamb_update_kernel<float>": GpuSpanKind.OPTIMIZER,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)": GpuSpanKind.ATTENTION,
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)": GpuSpanKind.ATTENTION,
    "void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*)": GpuSpanKind.EMBEDDING,
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>": GpuSpanKind.LOSS,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>": GpuSpanKind.EMBEDDING,
    "void transformer_engine::cast_fp8_1D_kernel<bf16, fp8e4m3>": GpuSpanKind.COPIES,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": GpuSpanKind.COMMUNICATION,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": GpuSpanKind.COMMUNICATION,
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": GpuSpanKind.COMMUNICATION,
    "void cub::DeviceRadixSortOnesweepKernel<Policy800>": GpuSpanKind.OTHER,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": GpuSpanKind.ATTENTION,
    "chunk_bwd_kernel_dqkwg": GpuSpanKind.ATTENTION,
    "_chunk_scan_fwd_kernel": GpuSpanKind.ATTENTION,
    "_state_passing_bwd_kernel": GpuSpanKind.ATTENTION,
    "l2norm_fwd_kernel": GpuSpanKind.NORM,
    "layer_norm_gated_bwd_kernel": GpuSpanKind.NORM,
    "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4>>":
        GpuSpanKind.POINTWISE,
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_a_kernel_is_classified_by_its_name(name: str) -> None:
    assert classify_kernel(name, "kernel") is KERNEL_NAMES[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", GpuSpanKind.HOST), ("Memcpy DtoH (Device -> Pageable)", GpuSpanKind.HOST),
        ("Memcpy DtoD (Device -> Device)", GpuSpanKind.COPIES),
    ],
)  # fmt: skip
def test_host_copies_are_distinguished_from_device_copies(name: str, kind: GpuSpanKind) -> None:
    assert classify_kernel(name, "gpu_memcpy") is kind


@pytest.mark.parametrize("kind", list(KernelKind))
def test_a_kernel_of_a_scenario_has_its_kind_in_every_format(kind: KernelKind) -> None:
    kinds = {
        classify_kernel(to_kineto_kernel(Kernel("x nccl flash", kind, dtype, 0.0, 0.0)).kernel, "kernel")
        for dtype in DType
    }
    assert len(kinds) == 1
    assert not kinds & {GpuSpanKind.OTHER, GpuSpanKind.COMMUNICATION}


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_a_matmul_has_its_sizes_in_every_format(dtype: DType) -> None:
    for batch in (1, 4):
        shape = MatmulShape(256, 512, 1024, batch=batch)
        kernel_event = to_kineto_kernel(Kernel("x", KernelKind.MATMUL, dtype, 0.0, 0.0, shape))
        label = make_span_label(
            kernel_event.kernel, "kernel", kernel_event.device_arguments, kernel_event.arguments["Input Dims"], {}
        )
        assert label.matmul_shape == (512, 256, 1024, batch)


@pytest.mark.parametrize(
    ("dims", "product"),
    [
        ([[64], [128, 32], [32, 64], [], []], (128, 64, 32, 1)),  # addmm
        ([[8, 128, 32], [8, 32, 64]], (128, 64, 32, 8)),  # bmm
        ([[128, 32], [48, 64]], None), ([[128, 32]], None), (None, None), ([["x", 2], [2, 3]], None),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_operator(dims: object, product: object) -> None:
    assert make_span_label("nvjet_tst", "kernel", {}, dims, {}).matmul_shape == product


@pytest.mark.parametrize(
    ("called", "kernel", "name"),
    [
        ("allreduce", "AllReduce_Sum_f32_RING_LL", "all_reduce"),
        ("_allgather_base", "AllGather_RING_LL", "all_gather"),
        ("allgather_into_tensor_coalesced", "AllGather_RING_LL", "all_gather"),
        ("_reduce_scatter_base", "ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("all_to_allv", "SendRecv", "all_to_all"),
        ("send", "SendRecv", "send_recv"), ("coalesced", "SendRecv", "send_recv"), ("", "SendRecv", "send_recv"),
        ("coalesced", "AllGather_RING_LL", "all_gather"), ("", "Broadcast_RING_LL", "broadcast"),
        ("", "Generic_4", "other"),
    ],
)  # fmt: skip
def test_a_collective_is_named_by_pytorch_or_else_by_its_kernel(called: str, kernel: str, name: str) -> None:
    arguments = {**ALL_REDUCE_ARGS, "Collective name": called}
    moved = make_span_label(
        f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)", "kernel", arguments, None, {}
    ).collective
    assert moved is not None
    assert moved.name == name


@pytest.mark.parametrize(
    ("ranks", "size", "members"),
    [
        ("[0, 1]", 2, (0, 1)), ("[0, 8, 16, ..., 56]", 8, tuple(range(0, 64, 8))), ("[0, 1, 8, ..., 57]", 8, ()),
        ("", 0, ()),
    ],
)  # fmt: skip
def test_group_ranks_are_read_from_the_trace_or_the_configuration(
    ranks: str, size: int, members: tuple[int, ...]
) -> None:
    arguments = {**ALL_REDUCE_ARGS, "Process Group Ranks": ranks, "Group size": size}
    moved = make_span_label("ncclDevKernel_AllReduce", "kernel", arguments, None, {}).collective
    assert moved is not None
    assert moved.members == members
    configured = make_span_label("ncclDevKernel_AllReduce", "kernel", arguments, None, {"7": (4, 5)}).collective
    assert configured is not None
    assert configured.members == (4, 5)
