from clustersim.report.topology import Tier, topology_figure, topology_page

POD = (
    Tier("GPU", 16_384, "450 GB/s", "8 to a node"),
    Tier("NVSwitch domain", 2_048, "50 GB/s per GPU"),
    Tier("leaf switch", 192, "3.2 TB/s", "1:7 oversubscribed"),
    Tier("core switch", 1),
)


def test_sixteen_thousand_gpus_are_a_few_dozen_boxes() -> None:
    bars = [trace for trace in topology_figure(POD).traces if trace["type"] == "bar"]
    assert [len(trace["x"]) for trace in bars] == [33, 26, 19, 1]


def test_counts_bandwidths_and_notes_are_written() -> None:
    words = " ".join(note["text"] for note in topology_figure(POD).layout["annotations"])
    for expected in ("16,384 × GPU", "450 GB/s", "1:7 oversubscribed", "1 × core switch"):
        assert expected in words


def test_names_of_a_users_topology_stay_text() -> None:
    text = topology_page("</title><script>", [Tier("<b>GPU", 1), Tier("</script>", 2)])
    assert "<b>GPU" not in text
    assert "</title><script>" not in text
