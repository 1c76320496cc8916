"""Interconnects in words."""

import pytest

from clustersim.common.errors import InputError
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.validation.cases import PUBLISHED_FOLDER
from clustersim.validation.collectives import compare_collectives, read_collectives
from clustersim.validation.interconnect_notation import InterconnectSpec, NetworkPorts, parse_interconnect


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "nvlink4 + 8x400G-ib-ndr",
            InterconnectSpec(LinkTechnology.NVLINK4, ports=NetworkPorts(8, 50e9, LinkTechnology.INFINIBAND)),
        ),
        ("nvlink4-400GB/s + 8x400G", InterconnectSpec(LinkTechnology.NVLINK4, 200e9, ports=NetworkPorts(8, 50e9))),
        (
            "nvlink5 + 8x400G-efa",
            InterconnectSpec(LinkTechnology.NVLINK5, ports=NetworkPorts(8, 50e9, LinkTechnology.EFA)),
        ),
        ("xgmi + 8x400G-roce", InterconnectSpec(ports=NetworkPorts(8, 50e9, LinkTechnology.ROCE))),
        (
            "nvl72 + 800G-ib per GPU",
            InterconnectSpec(nvlink_domain_size=72, ports=NetworkPorts(None, 100e9, LinkTechnology.INFINIBAND, True)),
        ),
        (
            "nvlink3 + 1600G-roce",
            InterconnectSpec(LinkTechnology.NVLINK3, ports=NetworkPorts(None, 200e9, LinkTechnology.ROCE)),
        ),
        (
            "nvlink3 + unknown-roce",
            InterconnectSpec(LinkTechnology.NVLINK3, ports=NetworkPorts(technology=LinkTechnology.ROCE)),
        ),
        (
            "nvlink4 + 8x200G-tcpxo (two hops)",
            InterconnectSpec(LinkTechnology.NVLINK4, ports=NetworkPorts(8, 25e9, LinkTechnology.TCPXO)),
        ),
        ("8x400G-ib-ndr", InterconnectSpec(ports=NetworkPorts(8, 50e9, LinkTechnology.INFINIBAND))),
        ("nvlink", InterconnectSpec()),
        ("PCIe5", InterconnectSpec()),
        ("unknown", InterconnectSpec()),
        ("", InterconnectSpec()),
    ],
)
def test_interconnect_notation_is_parsed(text, expected):
    assert parse_interconnect(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nvlnk4", r"unknown word 'nvlnk4'; did you mean nvlink4\?"),
        ("nvlink4 + 8x400G-ibb", r"unknown word 'ibb'; did you mean ib\?"),
        ("nvlink4 + eight ports", r"unknown word 'eight ports'"),
        ("nvlink9-400GB/s", r"unknown word 'nvlink9-400GB/s'"),
        ("nvl0", r"'nvl0': 0 is not from 1"),
        ("nvlink4 + 8x99999999999999999999G", "is not from 1"),
    ],
)
def test_an_unknown_word_is_rejected_with_a_suggestion(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_interconnect(text)


def test_an_invalid_interconnect_is_skipped(tmp_path):
    table = tmp_path / "mine.csv"
    header, first_line = (PUBLISHED_FOLDER / "collectives.csv").read_text(encoding="utf-8").splitlines()[:2]
    table.write_text(f"{header}\n{first_line.replace(',nvlink4,', ',nvlink44,')}\n", encoding="utf-8")
    (wrong,) = compare_collectives(read_collectives(table))
    assert wrong.skip_reason == "interconnect: unknown word 'nvlink44'; did you mean nvlink4?"
    assert not wrong.is_expressible
