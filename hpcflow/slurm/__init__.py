"""Jobs on a cluster: what is asked of Slurm, the script, submission, and the life of a job.

components    which ranks run on which nodes
script        the text of a job's sbatch script
client        Slurm's command-line tools, with deadlines
site          what the cluster has, against what a job asks for
snapshot      the copy of code and config that a job runs
submission    one job of a run
executor      the same for any function: a submitit executor of heterogeneous jobs
job           inside a job: time limit, relaunch, requeue
sweep         one job for each point of a sweep
"""
