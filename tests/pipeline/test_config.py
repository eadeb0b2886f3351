import pytest

from contracts.errors import ConfigError
from pipeline.config import SamplerConfig, parse_config

GOOD = {
    "run": {"name": "good"},
    "task": {"name": "addition", "prompt_length": 6, "completion_length": 4},
    "teacher": {"steps": 1},
    "diffusion": {"block_size": 4},
    "training": {"steps": 1},
}


def changed(**sections):
    return {**GOOD, **{name: {**GOOD.get(name, {}), **section} for name, section in sections.items()}}


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"diffusion": {"block_size": 0}}, "diffusion.block_size"),
        ({"diffusion": {"alignment": "shifted", "canvas": "all_masked"}}, "diffusion"),
        ({"rollout": {"rule": "threshold", "value": 1.1}}, "rollout"),
        ({"rollout": {"rule": "prefix", "value": -0.1}}, "rollout"),
        ({"rollout": {"rule": "static", "value": 1.5}}, "rollout"),
        ({"rollout": {"rule": "static", "value": 5}}, "rollout.value"),
        ({"rollout": {"rule": "factor", "value": 0}}, "rollout"),
        ({"rollout": {"temperature": -1}}, "rollout.temperature"),
        ({"objective": {"soft": 0, "hard": 0}}, "objective"),
        ({"objective": {"temperature": 0}}, "objective.temperature"),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"training": {"max_lag": -1}}, "training.max_lag"),
        ({"training": {"max_lags": 1}}, "training.max_lags"),
        ({"teacher": {"steps": 0}}, "teacher.steps"),
        ({"run": {"name": "../elsewhere"}}, "run.name"),
        ({"runner": {"visible_cores": 1}}, "runner.visible_cores"),
        ({"runner": {"rollout": {"num_gpus": 0.5}}}, "runner.rollout"),
        ({"model": {"heads": 3, "kv_heads": 2}}, "model"),
        ({"model": {"source": "gguf"}}, "model"),
        ({"model": {"path": "x.gguf"}}, "model"),
        ({"model": {"source": "gguf", "path": "x.gguf", "width": 32}, "teacher": {"steps": 0}}, "model"),
        ({"model": {"source": "gguf", "path": "x.gguf"}}, "teacher.steps"),
        ({"evaluation": {"sampler": {"rule": "static", "value": 5}}}, "evaluation.sampler.value"),
        ({"diffusion": {"origin": "sequence", "prompt_attention": "full"}}, "diffusion"),
        ({"run": {"seed": 2**63}}, "run.seed"),
        ({"runner": {"trainer": {"count": 2}}}, "runner.trainer"),
        ({"runner": {"rollout": {"num_gpus": 2}}}, "runner.rollout"),
        ({"runner": {"teacher": {"num_gpus": 2}}}, "runner.teacher"),
    ],
)
def test_a_value_out_of_its_domain_is_named_by_its_dotted_path(sections, path):
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        parse_config(changed(**sections))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "path",
    [
        "rollout.temperature",
        "rollout.value",
        "objective.soft",
        "objective.temperature",
        "training.learning_rate",
        "training.max_grad_norm",
        "teacher.learning_rate",
        "runner.item_deadline",
    ],
)
def test_a_number_that_is_not_finite_is_refused(path, number):
    section, name = path.split(".")
    rule = {"rule": "factor"} if section == "rollout" else {}
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        parse_config(changed(**{section: {**rule, name: number}}))


def test_problems_between_sections_are_told_at_once_and_by_path():
    static = {"rule": "static", "value": 5}
    with pytest.raises(ConfigError) as refusal:
        parse_config(changed(rollout=static, evaluation={"sampler": static}, teacher={"steps": 0}))
    lines = [line.split(":")[0] for line in str(refusal.value).splitlines()[1:]]
    assert lines == ["  rollout.value", "  evaluation.sampler.value", "  teacher.steps"]


def test_the_student_is_measured_as_it_is_rolled_out_unless_stated():
    rollout = {"rule": "prefix", "value": 0.7, "temperature": 1.0}
    assert parse_config(changed(rollout=rollout)).deployed_sampler == SamplerConfig(**rollout)
    stated = parse_config(changed(rollout=rollout, evaluation={"sampler": {"value": 0.5}})).deployed_sampler
    assert stated == SamplerConfig(rule="prefix", value=0.5, temperature=1.0)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as refusal:
        parse_config(changed(diffusion={"block_size": 0}, training={"steps": -1, "rows": 0}, run={"nome": "x"}))
    told = str(refusal.value)
    assert all(path in told for path in ("diffusion.block_size", "training.steps", "training.rows", "run.nome"))


def test_the_digest_knows_what_decides_the_result_and_nothing_else():
    def digest(**sections):
        return parse_config(changed(**sections)).digest()

    plain = digest()
    assert digest(run={"name": "other", "folder": "x"}) == plain
    assert digest(runner={"rollout": {"count": 8}, "kind": "inline"}) == plain
    for sections in (
        {"run": {"seed": 1}},
        {"training": {"max_lag": 1}},
        {"objective": {"hard": 0.2}},
        {"runner": {"visible_cores": 4}},
        {"evaluation": {"rows": 7}},
    ):
        assert digest(**sections) != plain
    named = {parse_config(GOOD).digest(prompts) for prompts in ("", "one", "other")}
    assert len(named) == 3


def test_the_teachers_digest_does_not_change_with_the_students_training():
    plain = parse_config(GOOD).teacher_digest()
    assert parse_config(changed(training={"rows": 8}, objective={"hard": 0.5})).teacher_digest() == plain
    assert parse_config(changed(teacher={"steps": 2})).teacher_digest() != plain
    assert parse_config(changed(run={"seed": 1})).teacher_digest() != plain
    assert parse_config(changed(runner={"visible_cores": 4})).teacher_digest() != plain
    assert parse_config(GOOD).teacher_digest("another corpus") != plain
