"""Partition: one model over unlike GPUs, as pipeline stages of contiguous layers.

``shape`` says what a layer weighs, ``machines`` what there is to put it on, ``timing`` what a stage takes and needs,
``precision`` what quantizing costs, ``search`` finds the best cut, ``placement`` is a cut with everything known about
it, ``explain`` says what stands in its way, ``engines`` what vLLM and TensorRT-LLM can run of it, ``moves`` how to get
there from another. Pure: no I/O but the data that comes with the package.
"""
