"""Generative judges: a model with weights reads a rubric and writes a verdict. The reward is ``rewards/judge.py``.

rubric.py    a template, a sample and its pictures -> what the judge reads
answers.py   what the judge wrote, or its log-probs -> a verdict, checked
modes.py     samples -> questions, and verdicts -> scores: pointwise, pairwise, ranking, steps
protocol.py  what answers questions: `LocalJudge`, `RemoteJudge`
local.py     transformers in this process        remote.py  an OpenAI-compatible endpoint        server.py  our own vLLM
store.py     the cache by content and the transcripts        report.py  their lowest and highest
replay.py    recorded verdicts in place of asking (``mmrl verify``)
agreement.py a judge against held-out truth (``mmrl judge``)
"""
