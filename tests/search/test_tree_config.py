"""Settings of the tree search: flag, then file, then default."""

import pytest

from lasd.errors import LasdError
from search.tree_config import parse_config

NEEDED = ["--model", "m", "--artifact", "runs/heads", "--data", "d"]


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path):
    (tmp_path / "c.yaml").write_text("max_nodes: 32\nmax_rank: 5\n")
    config = parse_config([*NEEDED, "--config", str(tmp_path / "c.yaml"), "--max_nodes", "16"])
    assert (config.max_nodes, config.max_rank, config.limit) == (16, 5, 300)


def test_contexts_take_several_numbers():
    assert parse_config([*NEEDED, "--contexts", "128", "512"]).contexts == [128, 512]


def test_the_work_folder_lies_beside_the_artifact():
    assert str(parse_config(NEEDED).folder) == "runs/heads-tree-search"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*NEEDED, "--max_node", "3", "--limits", "4"], "max_node .did you mean max_nodes"),
        ([*NEEDED, "--max_nodes", "many"], "invalid int value"),
        ([*NEEDED, "--max_nodes", "1"], "max_nodes is 1; it must be a whole number from 2"),
        ([*NEEDED, "--contexts", "0"], r"contexts is \[0\]"),
        ([*NEEDED, "--held_out_share", "2"], "held_out_share is 2"),
        ([*NEEDED, "--prompts", "p"], "both --data and --prompts"),
        (NEEDED[:4], "neither --data nor --prompts"),
        (NEEDED[2:], "--model is missing"),
        ([*NEEDED, "--config"], "--config has no value"),
        ([*NEEDED, "--config", "nowhere.yaml"], "nowhere.yaml is not a file"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments, text):
    with pytest.raises(LasdError, match=text):
        parse_config(arguments)


@pytest.mark.parametrize(
    ("content", "text"),
    [("max_node: 3", "max_node"), ("contexts: 256", "contexts is 256"), ("- 1", "holds a list"), ("a: [", "as YAML")],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, content, text):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(LasdError, match=text):
        parse_config([*NEEDED, "--config", str(tmp_path / "c.yaml")])
