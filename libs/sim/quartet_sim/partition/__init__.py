"""Partition: one model over unlike GPUs, as pipeline stages of contiguous layers.

``shape`` says what a layer weighs, ``machines`` what there is to put it on, ``timing`` what a stage takes and needs,
``precision`` what quantizing costs, ``search`` finds the best cut, ``placement`` is a cut with everything known about
it, ``explain`` says what binds it or stands in its way, ``engines`` and ``settings`` what vLLM and TensorRT-LLM make of
it, ``moves`` how to get there from another. Pure: no I/O but the data that comes with the package.
"""
