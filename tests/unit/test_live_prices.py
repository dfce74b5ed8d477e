"""Live prices: gpuhunt's offers under our names, and a plain note where there are none."""

import datetime
import sys
import types
from types import SimpleNamespace

import pytest

from shardwise.planner import live_prices
from shardwise.planner.live_prices import NoLivePrices, query_offers
from shardwise.spec import InputError
from shardwise.spec.presets import gpu_names, gpu_preset
from shardwise.verbs.offers import choose_offer

TODAY = datetime.date(2026, 11, 29)


def item(provider, name, price, *, gpus=8, gpu="H100", memory=80.0, spot=False):
    return SimpleNamespace(
        provider=provider, instance_name=name, price=price, gpu_count=gpus, gpu_name=gpu, gpu_memory=memory, spot=spot
    )


OFFERS = [
    item("aws", "p5.48xlarge", 55.04),
    item("aws", "p5.48xlarge", 48.0),
    item("aws", "p5.48xlarge", 24.0, spot=True),
    item("lambdalabs", "gpu_1x_h100_pcie", 3.29, gpus=1),
    item("vastai", "123", 5.0, gpus=2),
    item("azure", "Standard_ND96isr_H100_v5", 98.32),
    item("runpod", "NVIDIA A100-SXM4-80GB", 1.79, gpus=1, gpu="A100"),
    item("gcp", "a2-highgpu-1g", 3.67, gpus=1, gpu="A100", memory=40.0),
    item("azure", "Standard_NC40ads_H100_v5", 6.98, gpus=1, gpu="H100NVL", memory=94.0),
    item("vultr", "free", 0.0),
]


@pytest.fixture(autouse=True)
def forget():
    live_prices._ask.cache_clear()
    yield
    live_prices._ask.cache_clear()


def test_offers_are_per_gpu_and_the_cheapest_of_each_kind(monkeypatch):
    fake = types.ModuleType("gpuhunt")
    fake.query = lambda **wanted: [offer for offer in OFFERS if offer.gpu_name in wanted["gpu_name"]]
    monkeypatch.setitem(sys.modules, "gpuhunt", fake)
    rows = query_offers(TODAY)
    found = {(row["gpu"], row["provider"], row["kind"]): row["usd_per_gpu_hour"] for row in rows}
    assert found == {
        ("h100-sxm", "aws", "on-demand"): 6.0,
        ("h100-sxm", "aws", "spot"): 3.0,
        ("h100-pcie", "lambda", "on-demand"): 3.29,
        ("h100-sxm", "vast", "community"): 2.5,
        ("h100-sxm", "azure", "on-demand"): 12.29,
        ("a100-80-sxm", "runpod", "on-demand"): 1.79,
        ("a100-40-sxm", "gcp", "on-demand"): 3.67,
    }
    assert {(row["date"], row["source"]) for row in rows} == {("2026-11-29", "gpuhunt")}
    assert set(live_prices._CHIPS) <= set(gpu_names())


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A gpuhunt that the child process finds, with this body of `query`."""

    def make(body):
        text = "from types import SimpleNamespace as Item\n\n\ndef query(**wanted):\n    " + body
        (tmp_path / "gpuhunt.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(sys.modules, "gpuhunt", types.ModuleType("gpuhunt"))

    return make


ONE = (
    "return [Item(provider='aws', instance_name='p5', price=40.0, gpu_count=8, gpu_name='H100', gpu_memory=80.0, "
    "spot=False)]"
)


def test_a_live_offer_counts_and_says_so(fake_package):
    fake_package(ONE)
    offer, notes = choose_offer(gpu_preset("h100-sxm"), live=True)
    assert (offer.provider, offer.usd_per_gpu_hour, offer.kind) == ("aws", 5.0, "on-demand")
    assert (offer.source, offer.date) == ("gpuhunt", datetime.date.today())
    assert notes == ["price: 5.0 USD per GPU-hour at aws (on-demand), read today with gpuhunt"]


@pytest.mark.parametrize("options", [{"spot": True}, {"provider": "runpod"}])
def test_what_gpuhunt_does_not_have_is_in_the_snapshot(fake_package, options):
    fake_package(ONE)
    offer, notes = choose_offer(gpu_preset("h100-sxm"), live=True, **options)
    assert offer.source != "gpuhunt"
    assert "the snapshot counts" in notes[0] and "days old" in notes[1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('no network')", "gpuhunt failed: OSError: no network"),
        ("return []", "gpuhunt found no offer"),
        ("import os; os._exit(0)", "cannot be read"),
    ],
)
def test_failures_are_notes(fake_package, body, reason):
    fake_package(body)
    offer, notes = choose_offer(gpu_preset("h100-sxm"), live=True)
    assert offer.source != "gpuhunt"
    assert reason in notes[0]


def test_a_hang_is_ended(fake_package):
    fake_package("import time; time.sleep(600)")
    with pytest.raises(NoLivePrices, match="did not answer within 1 seconds"):
        live_prices.live_prices(timeout=1.0)


def test_without_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "gpuhunt", raising=False)
    monkeypatch.setattr(live_prices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'shardwise\[prices\]'"):
        choose_offer(gpu_preset("h100-sxm"), live=True)


def test_one_price_at_a_time():
    with pytest.raises(InputError, match="exclude each other"):
        choose_offer(gpu_preset("h100-sxm"), price=2.0, live=True)
