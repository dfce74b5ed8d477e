"""What is kept on the CPU comes back as it was."""

import pytest
import torch

from shardwise.parallel.offload import _Held


@pytest.mark.parametrize("strided", [True, False])
def test_a_view_comes_back_with_its_strides_where_code_relies_on_them(strided):
    whole = torch.randn(4, 6, 8)
    view = whole[:, 1:3].transpose(0, 1)  # with gaps
    back = _Held(view, strided=strided).take()
    assert torch.equal(back, view)
    assert back.stride() == (view.stride() if strided else torch.empty_like(view).stride())
