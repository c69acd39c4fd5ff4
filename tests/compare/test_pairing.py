import pytest

from align.compare.model import Pairing
from align.compare.pairing import Counting, pair
from align.compare.pairing_fusion import FusionMap, components
from align.compare.pairing_rules import RenameRule, RenameRules, read_rules
from align.dumpers.choice import Site
from align.dumpers.errors import ConfigError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, Storage


def records(*texts, **fields):
    made = []
    for order, text in enumerate(texts):
        key = NodeKey.parse(text)
        kind = NodeKind.MODULE if key.op == "forward" else NodeKind.CALL
        made.append(
            NodeRecord(
                key,
                order,
                kind,
                "T",
                "float32",
                (2,),
                storage=fields.get("storage", Storage.TENSOR),
                site=fields.get("site", ""),
            )
        )
    return tuple(made)


def outcome(pairs):
    return {str(found.key): (found.pairing, str(found.candidate.key) if found.candidate else None) for found in pairs}


def test_equal_keys_pair_exactly_in_the_references_order():
    reference = records("a/forward#0:0", "b/forward#0:0", "b/forward#0:0@1", "/forward#0:0%1")
    pairs = pair(tuple(reversed(reference)), reference)
    assert [found.key for found in pairs] == [record.key for record in reference]
    assert all(found.pairing is Pairing.EXACT for found in pairs)


@pytest.mark.parametrize("name", ["module.a.b", "_orig_mod.a.b", "a._orig_mod.b", "module._orig_mod.a.module.b"])
def test_wrapper_names_are_dropped_wherever_they_stand_and_on_either_side(name):
    plain, wrapped = records("a.b/relu#0:0"), records(f"{name}/relu#0:0")
    assert pair(wrapped, plain)[0].pairing is Pairing.PREFIX
    assert pair(plain, wrapped)[0].pairing is Pairing.PREFIX


def test_a_wrapper_name_that_leaves_two_possibilities_is_not_guessed():
    found = outcome(pair(records("x.module.a/forward#0:0", "module.x.a/forward#0:0"), records("x.a/forward#0:0")))
    assert found["x.a/forward#0:0"] == (Pairing.MISSING, None)


def test_a_users_module_of_the_name_module_pairs_exactly_first():
    both = records("module.a/forward#0:0", "a/forward#0:0")
    assert {found.pairing for found in pair(both, both)} == {Pairing.EXACT}


def test_nodes_swallowed_by_a_kernel_are_fused_away_and_its_output_stands_for_the_last_call():
    site = "attention@a/matmul#1"
    reference = records("a/matmul#0:0", "a/softmax#0:0", "a/matmul#1:0", "a/forward#0:0")
    candidate = (
        *records("a/matmul#0:0", "a/softmax#0:0", storage=Storage.FUSED, site=site),
        *records("a/matmul#1:0", site=site),
        *records("a/forward#0:0"),
    )
    pairs = pair(candidate, reference)
    assert [found.pairing for found in pairs] == [
        Pairing.FUSED_AWAY,
        Pairing.FUSED_AWAY,
        Pairing.FUSED_OUTPUT,
        Pairing.EXACT,
    ]
    assert [found.site for found in pairs] == [site, site, site, ""]


def test_a_site_explains_interior_calls_that_left_no_record():
    reference = records("a/matmul#0:0", "a/softmax#0:0", "a/dot#0:0")
    candidate = records("a/dot#0:0", site="attention@a/dot#0")
    fusions = FusionMap((Site("attention", ("a/matmul#0", "a/softmax#0", "a/dot#0")),))
    assert [found.pairing for found in pair(candidate, reference, fusions=fusions)] == [
        Pairing.FUSED_AWAY, Pairing.FUSED_AWAY, Pairing.FUSED_OUTPUT,
    ]  # fmt: skip


def test_unmatched_nodes_are_missing_and_extra_with_a_reason():
    pairs = pair(records("a/forward#0:0", "new/forward#0:0"), records("a/forward#0:0", "old/forward#0:0"))
    assert [(found.pairing, bool(found.problem)) for found in pairs] == [
        (Pairing.EXACT, False), (Pairing.MISSING, True), (Pairing.EXTRA, True),
    ]  # fmt: skip


def test_one_call_against_64_calls_is_reported_and_none_of_them_guessed():
    reference = records("qkv/forward#0:0", "/forward#0:0")
    candidate = records(*(f"qkv/forward#{call}:0" for call in range(64)), "/forward#0:0")
    pairs = pair(candidate, reference)
    assert pairs[0].pairing is Pairing.MISSING
    assert pairs[0].problem == "called 64 times in the candidate, once in the reference"
    assert pairs[1].pairing is Pairing.EXACT
    assert sum(found.pairing is Pairing.EXTRA for found in pairs) == 64
    assert pairs[2].problem == pairs[0].problem


def test_the_calls_before_a_run_broke_off_still_pair():
    reference = records("a/add#0:0", "a/add#1:0")
    assert pair(reference[:1], reference)[0].pairing is Pairing.MISSING
    broken = pair(reference[:1], reference, counting=Counting.TRUNCATED)
    assert [found.pairing for found in broken] == [Pairing.EXACT, Pairing.MISSING]


def test_n_calls_that_became_m_calls_pair_at_the_end_of_their_component():
    reference = records("r/a#0:0", "r/b#0:0", "r/c#0:0", "r/d#0:0", "/forward#0:0")
    candidate = records("k/one#0:0", "k/two#0:0", "/forward#0:0")
    fusions = FusionMap(origins=(("k/one#0", ("r/a#0", "r/b#0")), ("k/two#0", ("r/b#0", "r/c#0", "r/d#0"))))
    assert [group.reference for group in components(fusions, candidate, reference)] == [
        ("r/a#0", "r/b#0", "r/c#0", "r/d#0")
    ]
    found = outcome(pair(candidate, reference, fusions=fusions))
    assert found == {
        "r/a#0:0": (Pairing.FUSED_AWAY, None),
        "r/b#0:0": (Pairing.FUSED_AWAY, None),
        "r/c#0:0": (Pairing.FUSED_AWAY, None),
        "r/d#0:0": (Pairing.FUSED_OUTPUT, "k/two#0:0"),
        "/forward#0:0": (Pairing.EXACT, "/forward#0:0"),
        "k/one#0:0": (Pairing.EXTRA, "k/one#0:0"),
    }


@pytest.mark.parametrize(
    ("source", "target", "old", "new"),
    [
        ("encoder.layer.*", "blocks.*", "encoder.layer.3.mlp/forward#0:0", "blocks.3.mlp/forward#0:0"),
        ("enc", "encoder", "enc/forward#0:0@2", "encoder/forward#0:0@2"),
        ("**.attn", "**.attention", "a.b.attn.q/forward#0:0", "a.b.attention.q/forward#0:0"),
        (r"re:h\.(\d+)\.mlp", r"blocks.\1.ff", "h.7.mlp.up/forward#0:0", "blocks.7.ff.up/forward#0:0"),
        ("a/npu_gelu#0", "a/gelu#0", "a/npu_gelu#0:0", "a/gelu#0:0"),
    ],
)
def test_a_rename_rule_brings_a_module_and_all_below_it_to_its_other_name(source, target, old, new):
    rules = RenameRules((RenameRule(source, target),))
    assert outcome(pair(records(old), records(new), rules=rules)) == {new: (Pairing.RULE, old)}


def test_a_rule_ends_at_a_component():
    assert RenameRule("enc", "encoder").apply(NodeKey("encoder2", "forward")) is None


@pytest.mark.parametrize(("source", "target"), [("nowhere.*", "a"), ("a", "elsewhere")])
def test_a_rule_that_leads_nowhere_is_an_error_that_names_it(source, target):
    with pytest.raises(ConfigError) as caught:
        pair(records("a/forward#0:0"), records("b/forward#0:0"), rules=RenameRules((RenameRule(source, target),)))
    assert repr(source) in caught.value.problem


def test_a_rules_file_is_read_in_order(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text("[[rename]]\nfrom = \"a\"\nto = \"b\"\n[[rename]]\nfrom = 're:c(\\d)'\nto = 'd\\1'\n")
    assert read_rules(file) == RenameRules((RenameRule("a", "b"), RenameRule(r"re:c(\d)", r"d\1")))


@pytest.mark.parametrize(
    "text",
    ["[[rename]]\nfrom='a'", "[rename]\nx=1", "[[rename]]\nfrom='re:('\nto='b'", "[[", "[[renames]]\nfrom='a'\nto='b'"],
)
def test_a_wrong_rules_file_is_a_two_line_error(tmp_path, text):
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_rules(file)
