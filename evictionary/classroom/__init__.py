"""The classroom: assignments, what a student is told, and a grader that runs student code in a child process.

`assignment.py` reads an assignment's folder; `worker.py` is the program of the child, `child.py` the parent's end of it;
`grading.py` puts the laws to a submission, `inputs.py` draws their inputs from a seed; `submissions.py` opens archives;
`formats.py` writes grade.json and what platforms read; `classes.py` grades a folder of submissions; `contest.py` runs a scorer in
the embedded model; `synthetic.py` makes up a class.
"""
