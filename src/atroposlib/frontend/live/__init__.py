"""The live page of a run and its rollout reader: plain HTML, CSS and JavaScript over the run log."""
