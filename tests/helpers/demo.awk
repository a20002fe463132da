# The last lines of `make demo`, from the rows that the three scripts have printed.
# idle: how many cores had nothing to do when it began.

$2 == "singlegpu" { one = $(NF - 1); accuracy_of_one = $5 }
$2 == "multigpu"  { two = $(NF - 1); accuracy_of_two = $5 }
$2 == "quantize"  { megabytes[$3] = $4; accuracy[$3] = $5; single[$3] = $6; many[$3] = $7 }

END {
    printf "Two processes are %.2f times as fast as one: an epoch takes %.2f s, and %.2f s with one.", one / two, two, one
    printf " The accuracy is %s and %s.\n", accuracy_of_two, accuracy_of_one
    printf "int8 has %s MB, and fp32 %s MB. The accuracy is %s and %s.\n", \
        megabytes["int8"], megabytes["fp32"], accuracy["int8"], accuracy["fp32"]
    printf "int8 reads 240 images at a time %.2f times as fast as fp32, and one at a time %.2f times as fast.\n", \
        many["int8"] / many["fp32"], single["int8"] / single["fp32"]
    if (idle < 1.7)
        print "Other work has the cores: " idle " were idle at the start, and two are needed."
}
