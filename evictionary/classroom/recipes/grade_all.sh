#!/usr/bin/env bash
# Grades each submission of the folder `handed_in` in a container of its own; the grades come to a folder of the
# assignment in `grades`. Its seed file has the assignment's name.
# A container writes into a new folder, and what lies there is taken when the container has ended.
{
set -euo pipefail
assignment=keydiff
grades=grades/$assignment
reason="The grader failed, which is not your doing. Please tell your instructor."
code=0

if [ ! -r "$assignment.secret" ]; then # without it nobody has a grade, and an earlier one would be lost
  echo "no file $assignment.secret" >&2
  exit 2
fi
mkdir -p "$grades"
for each in "$PWD"/handed_in/*; do
  name=$(basename "$each"); id=${name%.zip}; id=${id%.tar.gz}; id=${id%.py}
  private=$(mktemp -d "$PWD/$grades/.XXXXXX") # of mode 700
  mkdir -- "$private/$id"
  docker run --rm --interactive --network none --read-only --tmpfs /tmp --tmpfs /out \
    --cap-drop ALL --cap-add SETUID --cap-add SETGID --cap-add KILL --cap-add DAC_OVERRIDE \
    --security-opt no-new-privileges --memory 4g --pids-limit 64 \
    --volume "$each:/in/$name:ro" --volume "$private/$id:/out/$id" \
    evictionary-grader grade "/in/$name" --assignment $assignment --student="$id" \
    --seed-file /dev/stdin --output /out < "$assignment.secret" || rm -rf -- "$private/$id"
  rm -rf -- "$grades/$id"
  if [ -f "$private/$id/grade.json" ] && [ ! -L "$private/$id/grade.json" ]; then
    mv -- "$private/$id" "$grades/$id"
  else
    code=1
    evictionary grade --zero "$reason" --assignment $assignment --student="$id" --output "$grades" \
      || echo "$each: no grade" >&2
  fi
  rm -rf -- "$private"
done
evictionary gradebook "$grades"
exit $code
}
