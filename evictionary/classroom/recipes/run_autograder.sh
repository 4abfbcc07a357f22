#!/usr/bin/env bash
# Grades one submission, and puts what the platform reads at `destination`, as the last thing that happens.
# There are 0 points and a reason unless the grader has ended well. The braces: bash reads all before it begins.
{
set -euo pipefail
umask 077

assignment=keydiff
format=gradescope
file=results.json
submission=/autograder/submission
secret=/autograder/source/secret
destination=/autograder/results/results.json
student=student
reason="The grader failed, which is not your doing. Please tell your instructor."

private=$(mktemp -d) # a new folder of mode 700
touch "$private/log"
found=$private/grades/$student/$file
trap finish EXIT
trap 'exit 1' HUP INT TERM

finish() {
  code=$?
  trap - EXIT
  set +e
  sed 's/^/| /' "$private/log" # no line of it begins as a student chose
  [ $code = 0 ] || found=$private/zero/$student/$file
  new=$(mktemp "$(dirname "$destination")/.XXXXXX") || code=1
  cat "$found" > "$new" 2> /dev/null || printf '{"score": 0, "output": "%s"}\n' "$reason" > "$new" || code=1
  chmod 644 "$new"
  rm -rf -- "$destination" # whatever lies there by now
  mv -fT -- "$new" "$destination" || code=1
  rm -rf -- "$private"
  exit $code
}

grade() {
  evictionary grade "$@" --assignment $assignment --student "$student" --format $format > "$private/log" 2>&1
}

cd /
rm -rf -- "$destination"
chmod 600 "$secret"
grade --zero "$reason" --output "$private/zero"
grade "$submission" --seed-file /dev/stdin --output "$private/grades" --without-walls < "$secret"
[ -s "$found" ]
[ ! -L "$found" ]
exit 0
}
