"""What goes from stage to stage: tensors in one message, in memory that is used again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_prims.training.pipeline.packet import WELL, Packet, PacketLayout, Pool, read_head, spec_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.int8, torch.bool]

tensors = st.builds(
    lambda dtype, shape, swap: (
        torch.ones(shape).mul(3).to(dtype).transpose(0, -1) if swap and shape else torch.ones(shape, dtype=dtype)
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(tensors, max_size=5))
def test_tensors_lie_in_a_message_as_they_were(several: list[torch.Tensor]) -> None:
    layout = PacketLayout(map(spec_of, several))
    assert PacketLayout.decode(layout.encode()) == layout
    packet = Packet.empty(layout, torch.device("cpu"))
    packet.data.fill_(255)
    packet.write(several)
    assert read_head(packet.data) == (WELL, "")
    for view, tensor in zip(layout.views(packet.data), several, strict=True):
        assert torch.equal(view, tensor)
        assert view.data_ptr() % 16 == 0 or not view.numel()


def test_memory_is_not_used_again_while_a_graph_has_it() -> None:
    pool = Pool(torch.device("cpu"))
    layout = PacketLayout([spec_of(torch.ones(4))])
    packet = pool.take(layout)
    place = packet.data.data_ptr()
    assert pool.take(layout).data.data_ptr() != place  # the packet is there
    x = packet.tensors[0].detach().fill_(1).requires_grad_()
    y = x.square().sum()
    del packet
    assert pool.take(layout).data.data_ptr() != place  # x and the graph are
    del x
    assert pool.take(layout).data.data_ptr() != place  # the graph is
    del y
    assert pool.take(layout).data.data_ptr() == place
