"""Flag > config file > default; unknown names and wrong values are one line."""

import subprocess
import sys

import pytest

from lasd.errors import LasdError
from tests.train.tiny_runs import repository
from train.config import MedusaConfig, read_config

NEEDED = ["--model", "demo", "--data", "d", "--output", "o"]


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def error(arguments):
    with pytest.raises(LasdError) as caught:
        read_config(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults():
    config = read_config(NEEDED)
    assert (config.num_heads, config.projection, config.learning_rate) == (4, "shared", 2e-3)
    assert (config.warmup, config.positions_per_batch, config.epochs) == (40, 512, 2)


def test_a_flag_beats_the_file_which_beats_the_default(tmp_path):
    path = write(tmp_path, "num_heads: 2\nepochs: 3\n")
    config = read_config([*NEEDED, "--config", path, "--epochs", "5"])
    assert (config.num_heads, config.epochs, config.num_layers) == (2, 5, 1)


def test_needed_settings_may_stand_in_the_file(tmp_path):
    path = write(tmp_path, "model: m\ndata: d\noutput: o\n")
    assert read_config([f"--config={path}"]).model == "m"


def test_numbers_written_with_an_exponent(tmp_path):
    assert read_config([*NEEDED, "--config", write(tmp_path, "learning_rate: 1e-3\n")]).learning_rate == 1e-3


def test_an_unknown_flag_names_the_nearest():
    assert "did you mean learning_rate?" in error([*NEEDED, "--learning-rat", "1"])


def test_an_unknown_key_in_the_file_names_the_nearest(tmp_path):
    assert "did you mean num_heads?" in error([*NEEDED, "--config", write(tmp_path, "num_head: 2\n")])


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--num_heads", "0", "num_heads is 0; expected 1 to 16"),
        ("--num_heads", "many", "num_heads"),
        ("--held_out_share", "1", "held_out_share is 1.0"),
        ("--epochs", "0", "epochs is 0.0; expected above 0"),
        ("--projection", "both", "projection"),
        ("--save_total_limit", "1", "save_total_limit is 1; expected 2 or above"),
    ],
)
def test_values_out_of_range(flag, value, expected):
    assert expected in error([*NEEDED, flag, value])


def test_values_of_a_wrong_type_in_the_file(tmp_path):
    path = write(tmp_path, "num_heads: 2.5\n")
    assert "num_heads is 2.5; expected a value of type int" in error([*NEEDED, "--config", path])


@pytest.mark.parametrize("missing", ["model", "data", "output"])
def test_a_missing_setting_is_named(missing):
    place = NEEDED.index(f"--{missing}")
    assert f"{missing} is missing" in error(NEEDED[:place] + NEEDED[place + 2 :])


def test_a_missing_file():
    assert "does not exist" in error([*NEEDED, "--config", "no/such.yaml"])


def test_a_broken_file(tmp_path):
    assert "not readable as YAML" in error([*NEEDED, "--config", write(tmp_path, "a: [1\nb: }\n")])


def test_recipes_are_readable():
    recipes = sorted((repository() / "recipes").glob("*/medusa*.yaml")) + [repository() / "recipes/smoke/train.yaml"]
    assert recipes
    for recipe in recipes:
        assert isinstance(read_config(["--config", str(recipe)]), MedusaConfig)


def test_recipes_say_what_command_hardware_and_result():
    for recipe in (repository() / "recipes").glob("*/medusa*.yaml"):
        header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
        for word in ("What:", "Command:", "Hardware:", "Measured:"):
            assert any(word in line for line in header), (recipe, word)


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert "lasd[train]" in error(NEEDED)


def test_the_entry_prints_one_line_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, "train/medusa.py", "--model", "demo"], cwd=repository(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: data is missing: pass --data, or set it in the --config file\n"
