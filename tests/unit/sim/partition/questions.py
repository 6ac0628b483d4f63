"""Questions for the tests: small invented models on real classes of cards, and the examples of the documents."""

from hypothesis import strategies as st

from quartet_core.catalogue import builtin
from quartet_sim.partition import precision
from quartet_sim.partition.engines import ENGINES
from quartet_sim.partition.machines import Node, pools_of
from quartet_sim.partition.placement import Limits
from quartet_sim.partition.precision import lesser
from quartet_sim.partition.question import Question
from quartet_sim.partition.shape import Shape, shape_of
from quartet_sim.partition.timing import Workload

CATALOGUE = builtin()
TABLE = precision.builtin()


def asked(model, nodes, work, *, engine="vllm", limits=None, precisions=("bf16", "fp8", "int4"), anywhere=False):
    """``model`` is a name in the catalogue or a shape."""
    shape = model if isinstance(model, Shape) else shape_of(CATALOGUE.model(model))
    pools = pools_of(nodes, CATALOGUE)
    classes = {pool.hardware.name: pool.hardware for pool in pools}
    return Question(
        shape=shape,
        pools=pools,
        work=work,
        table=TABLE,
        rules=ENGINES[engine],
        limits=limits or Limits(),
        precisions=precisions,
        aggressive_on=frozenset(classes) if anywhere else lesser(classes),
    )


def big_layers(layers, hidden=16384, kv_heads=8):
    """A model whose layers are so large that a handful fill a card. Its losses are those of the 70B."""
    return Shape(
        model="llama-3.1-70b",
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=hidden * 13,
        vocab=64_000,
        kv_layer_bytes=2 * kv_heads * 128 * 2,
    )


shapes = st.builds(big_layers, st.integers(2, 6), st.sampled_from([8192, 16384]), st.sampled_from([2, 8]))
workloads = st.builds(
    lambda prompt, output, concurrency, longest: Workload(
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=concurrency,
        max_model_len=max(longest, prompt + output),
    ),
    st.sampled_from([128, 2048, 16384]),
    st.sampled_from([16, 512]),
    st.sampled_from([4, 32, 128]),
    st.sampled_from([2048, 65536]),
)
cards = st.dictionaries(
    st.sampled_from(["H100_SXM5", "L40S_PCIE", "A100"]), st.sampled_from([1, 2]), min_size=1, max_size=2
)
nodes = st.lists(st.tuples(cards, st.sampled_from(["roce", ""])), min_size=1, max_size=2).map(
    lambda given: tuple(Node(f"n{i}", held, rdma) for i, (held, rdma) in enumerate(given))
)
limits = st.builds(
    lambda budget, utilisation, kv: Limits(
        budget_hundredths=budget, utilisation=utilisation, kv_bytes_per_element=kv, most_stages=4
    ),
    st.sampled_from([0, 5, 13, 20, 100]),
    st.sampled_from([0.5, 0.9]),
    st.sampled_from([1, 2]),
)
questions = st.builds(
    lambda shape, machines, work, engine, kept, anywhere: asked(
        shape, machines, work, engine=engine, limits=kept, anywhere=anywhere
    ),
    shapes,
    nodes,
    workloads,
    st.sampled_from(["vllm", "tensorrt-llm", "any"]),
    limits,
    st.booleans(),
)
